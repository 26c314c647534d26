"""POST /tokenize and /detokenize, as vLLM has them."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from dflash_openai.bodies import Pieces, PiecesResponse, encoded, in_thread, read_body
from dflash_openai.chat import draft_of
from dflash_openai.conversation import Draft, prepare
from dflash_openai.errors import invalid
from dflash_openai.schemas import ChatRequest
from dflash_openai.state import Frontend
from dflash_openai.tools import ToolUse

# Of a token id in JSON.
BYTES_OF_ID = 8


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A text, or messages for the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    enable_thinking: bool | None = None
    reasoning_effort: str | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Token ids."""

    model: str | None = None
    tokens: list[int]


async def tokenize(request: Request) -> Response:
    """The token ids of a prompt, as a completion of it would have."""
    frontend: Frontend = request.app.state.frontend
    body, _ = await read_body(request, TokenizeRequest, lambda body: None)
    model = frontend.model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise invalid("send exactly one of 'prompt' and 'messages'", "prompt")
    if body.prompt is not None:
        tokens = await model.prompts.from_text(body.prompt, body.add_special_tokens is not False)
    else:
        tokens = (await prepare(_draft(body, frontend))).prompt

    def written() -> Pieces:
        return encoded(
            {
                "count": len(tokens),
                "max_model_len": model.description.max_model_len,
                "tokens": tokens,
                "token_strs": model.tokenizer.token_texts(tokens) if body.return_token_strs else None,
            }
        )

    return PiecesResponse(await in_thread(len(tokens) * BYTES_OF_ID, written))


def _draft(body: TokenizeRequest, frontend: Frontend) -> Draft:
    """The chat with these messages, and with the tools that its model would see. Raises `ApiError`."""
    names = [name for name in body.__struct_fields__ if name in ChatRequest.__struct_fields__]
    chat = ChatRequest(**{name: getattr(body, name) for name in names})
    draft = draft_of(chat, frontend, {})
    return dataclasses.replace(draft, use=ToolUse(draft.use.offered))


async def detokenize(request: Request) -> Response:
    """The text of token ids, with special tokens."""
    frontend: Frontend = request.app.state.frontend
    body, _ = await read_body(request, DetokenizeRequest, lambda body: None)
    model = frontend.model(body.model)

    def decode() -> str:
        tokens = model.prompts.check_token_ids(body.tokens, "tokens") if body.tokens else []
        return model.tokenizer.decode(tokens, skip_special_tokens=False)

    text = await in_thread(len(body.tokens) * BYTES_OF_ID, decode)
    return Response(msgspec.json.encode({"prompt": text}), media_type="application/json")
