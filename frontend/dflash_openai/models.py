"""GET /v1/models."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from dflash_openai.state import Frontend, Model


def _card(model: Model, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "dflash-triton",
        "root": model.description.target_model or model.names[0],
        "parent": None,
        "max_model_len": model.description.max_model_len,
        "num_speculative_tokens": model.description.num_speculative_tokens,
    }


async def list_models(request: Request) -> Response:
    """Every name of the model."""
    frontend: Frontend = request.app.state.frontend
    model = frontend.model()
    body = {"object": "list", "data": [_card(model, name) for name in model.names]}
    return Response(msgspec.json.encode(body), media_type="application/json")


async def get_model(request: Request) -> Response:
    """One name; an id may have slashes."""
    frontend: Frontend = request.app.state.frontend
    name = request.path_params["name"]
    return Response(msgspec.json.encode(_card(frontend.model(name), name)), media_type="application/json")
