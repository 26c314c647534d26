"""What keeps a front end safe: its settings, and the middlewares that carry them out."""

from __future__ import annotations

import ssl
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from starlette.middleware import Middleware

from dflash_openai.middleware.access_log import AccessLogMiddleware
from dflash_openai.middleware.api_keys import ApiKey, KeyLimits
from dflash_openai.middleware.authentication import AuthenticationMiddleware
from dflash_openai.middleware.body_limit import BodyLimitMiddleware
from dflash_openai.middleware.browser_guard import BrowserGuardMiddleware
from dflash_openai.middleware.key_limits import KeyLimitsMiddleware
from dflash_openai.middleware.write_timeout import WriteTimeoutMiddleware


@dataclass(frozen=True)
class ServerTls:
    """HTTPS, by PEM files: our certificate with the chain above it, its key in PKCS #8, and the authority of clients'
    certificates where only clients with one are let in."""

    cert: str
    key: str
    client_ca: str | None = None

    def __post_init__(self) -> None:
        """Raises `ValueError` for files that cannot be used."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        for option, path in (("cert", self.cert), ("key", self.key), ("client-ca", self.client_ca)):
            if path is None:
                continue
            try:
                text = Path(path).read_text(encoding="ascii")
            except (OSError, UnicodeDecodeError) as error:
                reason = getattr(error, "strerror", "not PEM")
                raise ValueError(f"--tls-{option}: {path} cannot be read: {reason}") from None
            if path == self.key and "-----BEGIN PRIVATE KEY-----" not in text:
                raise ValueError(
                    f"{path} has no private key in PKCS #8; `openssl pkcs8 -topk8 -nocrypt -in {path}` writes one"
                )
        try:
            context.load_cert_chain(self.cert, self.key)
            if self.client_ca is not None:
                context.load_verify_locations(self.client_ca)
        except ssl.SSLError as error:
            raise ValueError(
                f"{self.cert} and {self.key} are not a certificate and its key in PEM, or {self.client_ca} is not an "
                f"authority's ({error.reason})"
            ) from None

    def warnings(self) -> Iterator[str]:
        """What is wrong with files that can be used all the same."""
        # Python's tests read certificates with it; nothing public does.
        fields = ssl._ssl._test_decode_cert(self.cert)  # type: ignore[attr-defined]
        if time.time() > ssl.cert_time_to_seconds(fields["notAfter"]):
            yield f"WARNING: the certificate in {self.cert} expired on {fields['notAfter']}: no client trusts it"
        elif time.time() < ssl.cert_time_to_seconds(fields["notBefore"]):
            yield f"WARNING: the certificate in {self.cert} is not valid before {fields['notBefore']}"
        yield from open_to_others(self.key)


def open_to_others(path: str | Path) -> Iterator[str]:
    """A warning where others than a secret file's owner and group may read it, or others than its owner change it."""
    mode = Path(path).stat().st_mode
    if mode & (stat.S_IROTH | stat.S_IWOTH | stat.S_IWGRP):
        yield f"WARNING: other users of this machine may read or change {path}; chmod 600 keeps it to its owner"


@dataclass(frozen=True, kw_only=True)
class SecurityConfig:
    """api_keys: those that are let in; empty: everyone is. key_limits: of keys without limits of their own, and of all
    clients together where there are no keys. open_metrics: /metrics needs no key.

    allowed_origins: sites whose pages may use the server; `*`: all. allowed_hosts: names that it answers to; None: any.

    max_body_bytes, body_timeout_s: the size of a request's body, and the seconds in which it must have come.
    max_prompt_tokens: the longest prompt; 0: as long as the model allows. write_timeout_s: the seconds that a part of a
    response waits for a client that does not read. keep_alive_timeout_s: the seconds after which a connection on which
    no request comes is closed.
    """

    api_keys: tuple[ApiKey, ...] = ()
    key_limits: KeyLimits = field(default_factory=KeyLimits)
    open_metrics: bool = False
    allowed_origins: tuple[str, ...] = ()
    allowed_hosts: frozenset[str] | None = None
    max_body_bytes: int = 8 * 2**20
    body_timeout_s: float = 60.0
    max_prompt_tokens: int = 0
    write_timeout_s: float = 60.0
    keep_alive_timeout_s: float = 75.0
    access_log: bool = True
    tls: ServerTls | None = None

    def middleware(self) -> list[Middleware]:
        """The middlewares, the outermost first. Each sees only what those before it have let through: the body of a
        client without a key is never read."""
        return [
            Middleware(AccessLogMiddleware, enabled=self.access_log),
            Middleware(WriteTimeoutMiddleware, timeout_s=self.write_timeout_s),
            Middleware(BrowserGuardMiddleware, allowed_origins=self.allowed_origins, hosts=self.allowed_hosts),
            Middleware(AuthenticationMiddleware, keys=self.api_keys, open_metrics=self.open_metrics),
            Middleware(KeyLimitsMiddleware, default=self.key_limits),
            Middleware(BodyLimitMiddleware, max_bytes=self.max_body_bytes, timeout_s=self.body_timeout_s),
        ]
