"""POST /v1/chat/completions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from dflash_backend.text.chat import PromptError, check_role, with_reasoning_names
from dflash_backend.text.client_json import quoted
from dflash_client import Delta
from dflash_client.results import Completion, TokenLogprobs
from dflash_openai.answers import Answer, Writer, respond
from dflash_openai.bodies import read_body
from dflash_openai.budget import check_asked
from dflash_openai.config import FrontendConfig
from dflash_openai.conversation import KV_PROMPT, Conversation, Draft, prepare
from dflash_openai.errors import invalid, refusing
from dflash_openai.generation import Generation
from dflash_openai.logprobs import LogprobWriter, of_prompt
from dflash_openai.messages import MessageReader
from dflash_openai.reasoning_tokens import ReasoningTokens
from dflash_openai.sampling import client_names, max_tokens, sampling_parameters, truncation
from dflash_openai.schemas import ChatRequest
from dflash_openai.state import Frontend
from dflash_openai.system_messages import with_one_system
from dflash_openai.tools import read_tool_use


async def create_chat_completion(request: Request) -> Response:
    """Answer messages."""
    frontend: Frontend = request.app.state.frontend

    _, draft = await read_body(request, ChatRequest, lambda body: draft_of(body, frontend, client_names(body)))
    return await answer_draft(request, draft, lambda asked, limit: ChatAnswer(draft.chat, asked))


def draft_of(chat: ChatRequest, frontend: Frontend, names: Mapping[str, str]) -> Draft:
    """The conversation that a chat request asks for. `names`: what its client calls parameters of the model, where it
    is not the same. Raises `ApiError`."""
    model = frontend.model(chat.model)
    use = read_tool_use(chat, model.output_format)
    messages, options = template_messages(chat.messages), template_options(chat)
    sampling = sampling_parameters(chat, model.description)
    _check_template(chat, frontend.config)
    kept, ids = truncation(chat, model.description.max_model_len), kv_prompt(chat)
    return Draft(model, chat, messages, options, use, sampling, names, kept, ids)


async def answer_draft(request: Request, draft: Draft, writer: Callable[[Conversation, int], Writer]) -> Response:
    """The answer to a conversation. `writer`: makes what writes it, of the conversation and the most tokens that the
    answer may have."""
    chat, model, asked = draft.chat, draft.model, await prepare(draft)
    limit = max_tokens(chat, len(asked.prompt), model.description, draft.names)
    says_limit = chat.max_tokens is not None or chat.max_completion_tokens is not None
    check_asked([len(asked.prompt)], [limit] if says_limit else None, asked.sampling, model.description)
    answer = writer(asked, limit)
    generation = Generation(request, [asked.prompt], asked.sampling, [limit], asked.names, bool(chat.stream))
    return await respond(answer, generation)


# The field with the text of a part of content, by the part's type.
_TEXT_PARTS = {"input_text": "text", "output_text": "text", "refusal": "refusal"}


def template_messages(given: Sequence[dict[str, Any]]) -> list[Mapping[str, Any]]:
    """Messages as chat templates know them: without nulls, with `system` for OpenAI's `developer`, one of them at the
    beginning, and with reasoning by each of its names. Raises `ApiError`."""
    if not given:
        raise invalid("'messages' is an empty list", "messages")
    messages = []
    for index, fields in enumerate(given):
        with refusing(PromptError, "messages"):
            check_role(fields.get("role"), f"message {index}")
        message = {name: value for name, value in fields.items() if value is not None}
        if message.get("role") == "developer":
            message["role"] = "system"
        # An answer that is a refusal has it in place of content.
        content = message.setdefault("content", message["refusal"] if isinstance(message.get("refusal"), str) else "")
        if not isinstance(content, str | list):
            raise invalid(f"message {index}: 'content' must be a text or a list of parts", f"messages[{index}].content")
        if isinstance(content, list):
            message["content"] = [_as_text_part(part) for part in content]
        messages.append(with_reasoning_names(message))
    return with_one_system(messages)


def _as_text_part(part: Any) -> Any:
    """A part of content that is text by another name, a refusal's or one of the responses API, by the name that chat
    templates know; any other as it is."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    name = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if name is None or not isinstance(part.get(name), str):
        return part
    return {"type": "text", "text": part[name]}


def template_options(body: ChatRequest) -> dict[str, Any]:
    """Variables of the chat template."""
    options = dict(body.chat_template_kwargs or {})
    if body.enable_thinking is not None:
        options["enable_thinking"] = body.enable_thinking
    if body.reasoning_effort is not None:
        options.setdefault("reasoning_effort", body.reasoning_effort)
        options.setdefault("enable_thinking", body.reasoning_effort != "none")
    return options


def kv_prompt(body: ChatRequest) -> list[Any] | None:
    """The prompt's token ids, where another server has made them of the messages. Raises `ApiError`."""
    ids = (body.kv_transfer_params or {}).get("prompt_token_ids")
    if ids is not None and not isinstance(ids, list):
        raise invalid(f"'{KV_PROMPT}' is {quoted(ids)}; allowed: a list of token ids", KV_PROMPT)
    return ids


def _check_template(body: ChatRequest, config: FrontendConfig) -> None:
    """A chat template that a request brings is a program that is run here. Raises `ApiError` where the operator has not
    allowed that, and where the last message is and is not the beginning of the answer."""
    if body.chat_template is not None and not config.trust_request_chat_template:
        raise invalid(
            "'chat_template' is refused: this server runs the templates of its requests only where it was started with "
            "--trust-request-chat-template; leave it out",
            "chat_template",
        )
    if body.continue_final_message and body.add_generation_prompt:
        raise invalid(
            "'continue_final_message' and 'add_generation_prompt' cannot both be true: the answer begins with the "
            "last message or with nothing",
            "continue_final_message",
        )


class ChatAnswer(Answer):
    """The choices of a chat completion."""

    id_prefix = "chatcmpl"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, body: ChatRequest, asked: Conversation) -> None:
        super().__init__(body, asked.model, [asked.prompt])
        self._asked = asked
        self.usage.num_reasoning_tokens = 0
        self._reasoning = defaultdict[int, ReasoningTokens](asked.reasoning_tokens)
        self._has_reasoned: set[int] = set()
        self._include_reasoning = body.include_reasoning is not False
        self._readers: dict[int, MessageReader] = {}
        self._returns_token_ids = bool(body.return_token_ids)
        as_token_ids = bool(body.return_tokens_as_token_ids)
        num_top = None if body.logprob_token_ids else body.top_logprobs or 0
        self._logprobs = LogprobWriter(num_top, as_token_ids, asked.model.tokenizer)

    def extra(self) -> dict[str, Any]:
        """The prompt's token ids and their log-probabilities, where they were asked for."""
        entries = self.of_prompts[0]
        return {
            "prompt_logprobs": None if entries is None else of_prompt(entries),
            "prompt_token_ids": self.prompts[0] if self._returns_token_ids else None,
        }

    def choice(self, prompt: int, index: int, completion: Completion) -> dict[str, Any]:
        """The message of a finished completion."""
        reader = self._reader()
        message = reader.message(completion.text)
        self._count_reasoning(reader, index, completion.token_ids)
        return {
            "index": index,
            "message": message,
            "logprobs": self._written(completion.logprobs),
            "finish_reason": reader.finish_reason(completion.finish_reason),
            "stop_reason": completion.stop_reason,
            "token_ids": completion.token_ids if self._returns_token_ids else None,
        }

    def chunks(self, prompt: int, delta: Delta) -> Iterator[dict[str, Any]]:
        """The role in an event of its own, before the first text; its content is null unless the answer begins with
        content, so that joined deltas have null where the whole answer has. Text that may become a tool call waits."""
        is_first = delta.index not in self._readers
        if is_first:
            self._readers[delta.index] = self._reader()
        reader = self._readers[delta.index]
        deltas = list(reader.deltas(delta.text, delta.finish_reason is not None))
        self._count_reasoning(reader, delta.index, delta.token_ids)
        if is_first:
            content = "" if deltas and "content" in deltas[0] else None
            role = {"index": delta.index, "delta": {"role": "assistant", "content": content}, "finish_reason": None}
            of_prompt = {"prompt_token_ids": self.prompts[0]} if self._returns_token_ids else {}
            yield {"choices": [role], **of_prompt}
        if not deltas and (delta.finish_reason or delta.logprobs or delta.steps or self._returns_token_ids):
            deltas = [{}]
        for place, fields in enumerate(deltas):
            is_first, is_last = place == 0, place == len(deltas) - 1
            choice = {
                "index": delta.index,
                "delta": fields,
                "logprobs": self._written(delta.logprobs) if is_first else None,
                "finish_reason": reader.finish_reason(delta.finish_reason) if is_last else None,
                **({"stop_reason": delta.stop_reason} if is_last and delta.finish_reason is not None else {}),
                **self._token_ids(delta.token_ids if is_first else ()),
                **({"steps": delta.steps} if is_first and delta.steps is not None else {}),
            }
            yield {"choices": [choice]}

    def _count_reasoning(self, reader: MessageReader, index: int, token_ids: Sequence[int]) -> None:
        """Count the tokens of a choice that come next."""
        self._reasoning[index].add(token_ids)
        if reader.has_reasoned:
            self._has_reasoned.add(index)
            self.usage.num_reasoning_tokens = sum(self._reasoning[each].count for each in self._has_reasoned)

    def _reader(self) -> MessageReader:
        return MessageReader(self._asked.parser(), self._include_reasoning, self._asked.use)

    def _written(self, entries: Sequence[TokenLogprobs] | None) -> dict[str, Any] | None:
        return None if entries is None else self._logprobs.chat(entries)

    def _token_ids(self, token_ids: Sequence[int]) -> dict[str, Any]:
        return {"token_ids": token_ids} if self._returns_token_ids else {}
