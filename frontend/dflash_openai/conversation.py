"""A conversation on its way to the model: its prompt, what its answer must be like, and how its answer is read."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_backend.messages import StructuredOutputs
from dflash_backend.text.client_json import texts
from dflash_backend.text.structured_outputs import FormatError, read_response_format, read_structured_outputs
from dflash_backend.text.truncation import Truncation
from dflash_openai.errors import ApiError, invalid
from dflash_openai.notices import log_once
from dflash_openai.parsing import OutputParser, harmony
from dflash_openai.reasoning_tokens import ReasoningTokens
from dflash_openai.schemas import ChatRequest
from dflash_openai.state import Model
from dflash_openai.tools import ToolUse

# The tokens at a prompt's end in which a chat template's mark of reasoning is looked for.
TAIL_TOKENS = 32
# What a client calls the token ids that another server has made of the messages.
KV_PROMPT = "kv_transfer_params.prompt_token_ids"
# The model's parameters that give an answer a format; a request has one of them at most.
FORMATS = ("response_format", "structured_outputs")


@dataclass(frozen=True, slots=True)
class Conversation:
    """A prompt's token ids, and the sampling parameters with which it is answered. `names` has what the client calls
    one of them, where it is not the same."""

    model: Model
    prompt: list[int]
    sampling: dict[str, Any]
    use: ToolUse
    tail: str
    names: Mapping[str, str]

    def reasoning_tokens(self) -> ReasoningTokens:
        """What counts the reasoning of one of its answers."""
        reasoning = self.model.output_format.reasoning
        if reasoning is None:
            return ReasoningTokens(())
        return ReasoningTokens(self.model.tokenizer.encode_part(reasoning.counted_to or reasoning.close))

    def parser(self) -> OutputParser:
        """What splits one of its answers."""
        return self.model.output_format.parser(self.tail, self.use.offered, self.use.parallel, self.use.forced)


@dataclass(frozen=True, slots=True)
class Draft:
    """A conversation as its client asks for it: the chat request `chat`, its messages and the variables `options` of
    the chat template, as this takes them. `sampling` are the request's parameters. `names` has what the client calls
    one of them, where it is not the same. `prompt_token_ids`: in place of the messages."""

    model: Model
    chat: ChatRequest
    messages: Sequence[Mapping[str, Any]]
    options: Mapping[str, Any]
    use: ToolUse
    sampling: Mapping[str, Any]
    names: Mapping[str, str]
    truncation: Truncation | None
    prompt_token_ids: Sequence[Any] | None


async def prepare(draft: Draft) -> Conversation:
    """The prompt of messages through the chat template, and the parameters that tools and reasoning need beside those
    of the request. Raises `ApiError`."""
    model, messages, use, sampling, names = draft.model, draft.messages, draft.use, draft.sampling, draft.names
    continue_final_message = draft.chat.continue_final_message
    if model.output_format.is_harmony:
        messages = harmony.template_messages(messages)
    if continue_final_message and use.forced:
        raise invalid("'tool_choice' forces a tool call, which cannot continue a message", "continue_final_message")
    if draft.prompt_token_ids is not None:
        prompt = model.prompts.check_token_ids(draft.prompt_token_ids, KV_PROMPT, draft.truncation)
    else:
        prompt = await _from_messages(draft, messages)
    if continue_final_message:
        tail = model.output_format.tail_of_message("".join(texts(messages[-1].get("content"))))
    else:
        tail = model.tokenizer.decode(prompt[-TAIL_TOKENS:], skip_special_tokens=False)
    sampling = dict(sampling)
    if grammar := await _grammar(draft, sampling):
        name = next((name for name in FORMATS if name in sampling), "tools")
        names = {**names, "structured_outputs": "tools" if use.forced else names.get(name, name)}
        sampling = {key: value for key, value in sampling.items() if key not in FORMATS}
        sampling["structured_outputs"] = grammar
    output = model.output_format
    # The grammar of a forced call in harmony has the reasoning in it.
    in_grammar = use.forced and output.is_harmony
    if output.reasoning is not None and not output.reasoning.is_closed_after(tail) and not in_grammar:
        _begin_after_reasoning(sampling, model.tokenizer.encode_part(output.reasoning.close))
    if output.shows_special_tokens:
        sampling["skip_special_tokens"] = False  # whatever the client says: its marks tell reasoning and calls apart
    return Conversation(model, prompt, sampling, use, tail, names)


async def _from_messages(draft: Draft, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """The prompt of messages through the chat template. Raises `ApiError`, with the client's name of the messages."""
    variables = {
        "tools": draft.use.offered,
        "continue_final_message": bool(draft.chat.continue_final_message),
        "add_generation_prompt": draft.chat.add_generation_prompt is not False,
        "chat_template": draft.chat.chat_template,
    }
    try:
        return await draft.model.prompts.from_messages(messages, draft.options, variables, draft.truncation)
    except ApiError as error:
        error.param = draft.names.get(error.param or "", error.param)
        raise


async def _grammar(draft: Draft, sampling: Mapping[str, Any]) -> dict[str, Any] | None:
    """The grammar of an answer that must call a tool, or that calls tools or else has the format that the request asks
    for; None where neither is so. Raises `ApiError`."""
    model, use = draft.model, draft.use
    given = next((name for name in FORMATS if name in sampling), None)
    if use.forced:
        if not model.description.structured_outputs:
            raise invalid(
                "'tool_choice' can be auto or none: this model's server cannot force a tool call", "tool_choice"
            )
        if given is not None:
            name = draft.names.get(given, given)
            log_once(f"forced {name}", lambda: f"where 'tool_choice' forces a tool call, '{name}' is ignored")
        wanted = None
    elif not use.offered or given is None or draft.chat.continue_final_message or model.output_format.is_harmony:
        # In harmony a format begins with the final message, and calls are messages of their own before it.
        return None
    elif (wanted := _wanted(given, sampling[given], draft.names)) is None:
        return None
    # Python builds it, which for hundreds of tools takes long.
    special = model.tokenizer.special_token_ids
    grammar: dict[str, Any] = {"grammar": await asyncio.to_thread(use.grammar, model.output_format, special, wanted)}
    if wanted is not None and wanted.after_reasoning:
        grammar["after_reasoning"] = wanted.after_reasoning
    return grammar


def _wanted(name: str, value: Any, names: Mapping[str, str]) -> StructuredOutputs | None:
    """The format that a parameter asks for. Raises `ApiError`."""
    read = read_response_format if name == "response_format" else read_structured_outputs
    try:
        return read(value)
    except FormatError as error:
        name = names.get(name, name)
        raise invalid(f"parameter '{name}' {error}", name) from None


def _begin_after_reasoning(sampling: dict[str, Any], marker: Sequence[int]) -> None:
    """Let a grammar begin when the reasoning has ended, which is at these tokens. It stays in the parameter that named
    it, which an error of the grammar names too."""
    for name in FORMATS:
        if isinstance(sampling.get(name), Mapping):
            sampling[name] = {**sampling[name], "after_reasoning": list(marker)}
