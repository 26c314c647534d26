"""GET /openapi.json: the endpoints and the schemas of their bodies."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from dflash_openai.anthropic_request import CountTokensRequest, MessagesRequest
from dflash_openai.responses_schemas import ResponsesRequest
from dflash_openai.schemas import ChatRequest, CompletionRequest
from dflash_openai.tokenize import DetokenizeRequest, TokenizeRequest

BODIES: dict[str, tuple[type[msgspec.Struct], str]] = {
    "/v1/chat/completions": (ChatRequest, "Answer messages"),
    "/v1/responses": (ResponsesRequest, "Answer an input, of which nothing is kept"),
    "/v1/responses/input_tokens": (ResponsesRequest, "Count the tokens of an input"),
    "/v1/messages": (MessagesRequest, "Answer messages, as Anthropic's API does"),
    "/v1/messages/count_tokens": (CountTokensRequest, "Count the tokens of messages"),
    "/v1/completions": (CompletionRequest, "Complete one or more prompts"),
    "/tokenize": (TokenizeRequest, "Token ids of a text or of messages"),
    "/detokenize": (DetokenizeRequest, "Text of token ids"),
}
PLAIN: dict[str, str] = {
    "/v1/models": "The names of the model",
    "/health/live": "Whether this front end lives",
    "/health/ready": "Whether requests are taken",
    "/version": "The version of this server",
    "/metrics": "Metrics in Prometheus's text format",
}


class Error(msgspec.Struct):
    """What is wrong, as OpenAI writes it."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    """The body of an answer that is an error."""

    error: Error


@cache
def document() -> bytes:
    """The OpenAPI document, as JSON."""
    structs = [*(body for body, _ in BODIES.values()), ErrorBody]
    (*references, of_error), components = msgspec.json.schema_components(
        structs, ref_template="#/components/schemas/{name}"
    )
    error = {"description": "an error", "content": {"application/json": {"schema": of_error}}}
    answers = {"200": {"description": "the answer"}, "default": error}
    paths: dict[str, Any] = {}
    for (path, (_, summary)), reference in zip(BODIES.items(), references, strict=True):
        content = {"application/json": {"schema": reference}}
        body = {"required": True, "content": content}
        paths[path] = {"post": {"summary": summary, "requestBody": body, "responses": answers}}
    for path, summary in PLAIN.items():
        paths[path] = {"get": {"summary": summary, "responses": answers}}
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "dflash-triton", "version": "1"},
            "paths": paths,
            "components": {"schemas": components},
        }
    )


async def get_openapi(request: Request) -> Response:
    """The document."""
    return Response(document(), media_type="application/json")
