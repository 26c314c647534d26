"""POST /tokenize and /detokenize, as vLLM has them."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from dflash_openai.bodies import Pieces, PiecesResponse, encoded, in_thread, read_body
from dflash_openai.chat import continues, template_messages
from dflash_openai.errors import invalid
from dflash_openai.state import Frontend

# Of a token id in JSON.
BYTES_OF_ID = 8


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A text, or messages for the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Token ids."""

    model: str | None = None
    tokens: list[int]


async def tokenize(request: Request) -> Response:
    """The token ids of a prompt, as a completion of it would have."""
    frontend: Frontend = request.app.state.frontend
    body = await read_body(request, TokenizeRequest, lambda body: body)
    model = frontend.model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise invalid("send exactly one of 'prompt' and 'messages'", "prompt")
    if body.prompt is not None:
        tokens = await model.prompts.from_text(body.prompt, body.add_special_tokens is not False)
    else:
        messages = template_messages(body.messages or [])
        options = body.chat_template_kwargs or {}
        tokens = await model.prompts.from_messages(messages, options, continue_final_message=continues(body))

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


async def detokenize(request: Request) -> Response:
    """The text of token ids, with special tokens."""
    frontend: Frontend = request.app.state.frontend
    body = await read_body(request, DetokenizeRequest, lambda body: body)
    model = frontend.model(body.model)

    def decode() -> str:
        tokens = model.prompts.check_token_ids(body.tokens, "tokens")
        return model.tokenizer.decode(tokens, skip_special_tokens=False)

    text = await in_thread(len(body.tokens) * BYTES_OF_ID, decode)
    return Response(msgspec.json.encode({"prompt": text}), media_type="application/json")
