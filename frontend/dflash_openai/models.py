"""GET /v1/models."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from dflash_openai.anthropic_errors import VERSION
from dflash_openai.state import Frontend, Model

# What Anthropic says of a model and this server has nothing to say of.
_UNKNOWN = ("capabilities", "line", "deprecated_at", "retires_at")


def _card(model: Model, name: str, anthropic: bool) -> dict[str, Any]:
    if anthropic:
        return {
            "type": "model",
            "id": name,
            "display_name": name,
            "created_at": datetime.fromtimestamp(model.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "lifecycle": "active",
            "max_input_tokens": model.description.max_model_len,
            # An answer may take what the prompt does not.
            "max_tokens": model.description.max_model_len,
            **dict.fromkeys(_UNKNOWN),
        }
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "dflash-triton",
        "root": model.description.target_model or model.names[0],
        "parent": model.names[0] if name in model.description.lora_names else None,
        "max_model_len": model.description.max_model_len,
        "num_speculative_tokens": model.description.num_speculative_tokens,
    }


async def list_models(request: Request) -> Response:
    """Every name of the model, in OpenAI's form, to Anthropic's clients in theirs."""
    frontend: Frontend = request.app.state.frontend
    model = frontend.model()
    anthropic = VERSION in request.headers
    body: dict[str, Any] = {"object": "list"}
    if anthropic:
        body = {"has_more": False, "first_id": model.names[0], "last_id": model.names[-1]}
    body["data"] = [_card(model, name, anthropic) for name in model.names]
    return Response(msgspec.json.encode(body), media_type="application/json")


async def get_model(request: Request) -> Response:
    """One name; an id may have slashes."""
    frontend: Frontend = request.app.state.frontend
    name = request.path_params["name"]
    card = _card(frontend.model(name), name, VERSION in request.headers)
    return Response(msgspec.json.encode(card), media_type="application/json")
