"""What one front end is told at its start."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import jinja2

from dflash_client.address import parse_url
from dflash_client.connection import Connection, Tls
from dflash_openai.parsing.selection import AUTO, select_output_format
from dflash_openai.security import SecurityConfig

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer


@dataclass(frozen=True, kw_only=True)
class FrontendConfig:
    """triton_urls: gRPC addresses of the servers, `grpc://HOST:PORT`, all of which serve the same model.
    triton_tls: whom to trust and who we are where one begins with `grpcs://`.
    prefill_urls: those of prefill servers, which compute prompts for them first (`kv_role`); empty: there are none.
    triton_metrics_urls: where their metrics are, to be shown with the front end's own. model_name: Triton's name of the
    model. served_model_names: what clients may call it, the first being its id; empty: the target's name and Triton's.
    tokenizer: a directory with the target's tokenizer, where the one that the model names is on another machine.
    request_timeout_s: the longest that a request may take, in seconds. drain_timeout_s: what running requests have to
    finish at a stop. tool_call_parser, reasoning_parser: how the model writes tool calls and reasoning, by vLLM's
    names; `auto` follows the chat template, `none` looks for none. security: who is let in, with how much, and how.
    ping_interval_s: a stream that has sent nothing for so long sends a comment; 0: never.
    chat_template: in place of the one that the tokenizer has; a template, or the path of a file with one.
    trust_request_chat_template: run the chat templates that requests bring.
    reject_unknown_fields: refuse requests with fields that the front end does not know; else they are ignored.
    return_tokens_as_token_ids: what that field of a request is where it is left out.
    enable_force_include_usage: end each stream with its usage, whatever its request says.
    heartbeat_fd: a descriptor to which the event loop writes once a second that it runs; None: to none.
    tracer: OpenTelemetry's, for the spans of requests; None: there are none.

    Raises `ValueError` for URLs and files that cannot be used.
    """

    triton_urls: tuple[str, ...] = ("grpc://127.0.0.1:8001",)
    prefill_urls: tuple[str, ...] = ()
    triton_tls: Tls = field(default_factory=Tls)
    triton_metrics_urls: tuple[str, ...] = ()
    model_name: str = "dflash"
    served_model_names: tuple[str, ...] = ()
    tokenizer: str | None = None
    host: str = "127.0.0.1"
    port: int = 9000
    request_timeout_s: float = 3600.0
    drain_timeout_s: float = 30.0
    tool_call_parser: str = AUTO
    reasoning_parser: str = AUTO
    security: SecurityConfig = field(default_factory=SecurityConfig)
    ping_interval_s: float = 10.0
    reject_unknown_fields: bool = False
    return_tokens_as_token_ids: bool = False
    enable_force_include_usage: bool = False
    chat_template: str | None = None
    trust_request_chat_template: bool = False
    heartbeat_fd: int | None = None
    tracer: Tracer | None = None

    def __post_init__(self) -> None:
        template = check_answer_options(self.tool_call_parser, self.reasoning_parser, self.chat_template)
        object.__setattr__(self, "chat_template", template)
        for url in (*self.triton_urls, *self.prefill_urls):
            location = parse_url(url, "grpc")
            if location.protocol != "grpc":
                raise ValueError(f"{url!r} is not a gRPC address; the front end speaks gRPC: give grpc://HOST:PORT")
            Connection.build(location, **dataclasses.asdict(self.triton_tls))


def check_answer_options(tool_call_parser: str, reasoning_parser: str, chat_template: str | None) -> str | None:
    """The chat template, where one is given. Raises `ValueError` for an option that cannot be used."""
    select_output_format("", (), tool_call_parser, reasoning_parser)
    return None if chat_template is None else read_template(chat_template)


def read_template(given: str) -> str:
    """A chat template, or the one in the file of that name. Raises `ValueError` for one that cannot be used."""
    from dflash_backend.text.tokenizer import has_any_power, parse_template

    text = given
    if not ("{{" in given or "{%" in given):
        try:
            text = Path(given).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
            raise ValueError(f"--chat-template: {given} cannot be read: {reason}") from None
    try:
        parse_template(text)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"--chat-template: line {error.lineno}: {error.message}") from None
    if has_any_power(text):
        raise ValueError("--chat-template: it computes a power of what is no small number, which may take any time")
    return text
