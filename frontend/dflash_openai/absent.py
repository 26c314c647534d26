"""Endpoints of OpenAI's and Anthropic's APIs that are not here, with why, for clients that ask for them."""

from __future__ import annotations

_TEXT_ALONE = "this server's model reads and writes text alone, so it has no"
_KEPT = "this server keeps no"
# By the beginning of a path, whole parts of it; the longest comes first where two fit.
_WHY = {
    "/v1/audio": f"{_TEXT_ALONE} audio",
    "/v1/images": f"{_TEXT_ALONE} images",
    "/v1/videos": f"{_TEXT_ALONE} videos",
    "/v1/realtime": f"{_TEXT_ALONE} realtime sessions; stream an answer",
    "/v1/embeddings": f"{_TEXT_ALONE} embeddings; a server of an embedding model has them",
    "/v1/moderations": "this server has no model that moderates",
    "/v1/responses/compact": "this server compacts no conversation; ask the model for a summary",
    "/v1/responses": f"{_KEPT} responses; send the whole conversation as 'input'",
    "/v1/conversations": f"{_KEPT} conversations; send the whole conversation as 'input' of /v1/responses",
    "/v1/chat/completions": f"{_KEPT} completions",
    "/v1/messages/batches": f"{_KEPT} batches; send their requests to /v1/messages, as many at a time as you like",
    "/v1/batches": f"{_KEPT} batches; send their requests one by one, as many at a time as you like",
    "/v1/files": f"{_KEPT} files; put their text into the messages",
    "/v1/uploads": f"{_KEPT} files; put their text into the messages",
    "/v1/vector_stores": f"{_KEPT} vector stores",
    "/v1/containers": f"{_KEPT} containers: it runs no tools itself",
    "/v1/assistants": f"{_KEPT} assistants; use /v1/responses or /v1/chat/completions",
    "/v1/threads": f"{_KEPT} threads; use /v1/responses or /v1/chat/completions",
    "/v1/fine_tuning": "this server trains no model",
}


def why_absent(path: str) -> str | None:
    """Why a path of OpenAI's or Anthropic's API is not here; None where it is none of those."""
    return next((why for begin, why in _WHY.items() if path == begin or path.startswith(f"{begin}/")), None)
