"""What one front end is told at its start."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class FrontendConfig:
    """triton_urls: gRPC addresses of the servers, `grpc://HOST:PORT`, all of which serve the same model. model_name:
    Triton's name of it. served_model_names: what clients may call it, the first being its id; empty: the target's name
    and Triton's. tokenizer: a directory with the target's tokenizer, where the one that the model names is on another
    machine. request_timeout_s: the longest that a request may take, in seconds.
    """

    triton_urls: tuple[str, ...] = ("grpc://127.0.0.1:8001",)
    model_name: str = "dflash"
    served_model_names: tuple[str, ...] = ()
    tokenizer: str | None = None
    host: str = "127.0.0.1"
    port: int = 9000
    request_timeout_s: float = 3600.0
