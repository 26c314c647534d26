"""API keys: where they come from, whom they name, and how a presented key is compared."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from dflash_backend.tenant_names import TENANT_NAME, TENANT_NAME_IN_WORDS

# Lines of keys, separated by line breaks or semicolons.
KEYS_VARIABLE = "DFLASH_API_KEYS"
MIN_KEY_LENGTH = 8
# What a header can carry in one piece.
_KEY = re.compile(r"[!-:<-~]+")  # a ; ends the entry of a key
LINE_IN_WORDS = "NAME KEY [requests_per_minute=N] [prompt_tokens_per_minute=N] [max_concurrency=N]"


@dataclass(frozen=True)
class KeyLimits:
    """What the requests of one key may use in one front end; 0: no limit."""

    requests_per_minute: int = 0
    prompt_tokens_per_minute: int = 0
    max_concurrency: int = 0

    def or_else(self, other: KeyLimits) -> KeyLimits:
        """These limits, and those of `other` where there is none here."""
        names = [entry.name for entry in fields(self)]
        return replace(self, **{name: getattr(self, name) or getattr(other, name) for name in names})


@dataclass(frozen=True)
class ApiKey:
    """One key. `name` is the engine's tenant; `digest` is the SHA-256 of the key, which itself is not kept."""

    name: str
    digest: bytes = field(repr=False)
    limits: KeyLimits = KeyLimits()

    @classmethod
    def of(cls, name: str, key: str, limits: KeyLimits | None = None) -> ApiKey:
        """The entry of a key in the clear. Raises ValueError, which does not quote the key."""
        if not name or not TENANT_NAME.fullmatch(name):
            raise ValueError(f"'{name}' is not a name of a key; allowed: {TENANT_NAME_IN_WORDS}")
        if not _KEY.fullmatch(key) or len(key) < MIN_KEY_LENGTH:
            raise ValueError(
                f"the key of '{name}' is not a key; allowed: at least {MIN_KEY_LENGTH} printable ASCII characters "
                "without spaces and semicolons"
            )
        return cls(name, _digest(key), limits or KeyLimits())


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def find_key(keys: Iterable[ApiKey], presented: str) -> ApiKey | None:
    """The key that a client presents. Each one is compared, and in constant time, so the time taken does not tell
    which of them is near."""
    digest = _digest(presented)
    found = [key for key in keys if hmac.compare_digest(key.digest, digest)]
    return found[-1] if found else None


def parse_keys(text: str, source: str) -> tuple[ApiKey, ...]:
    """The keys of a text with lines `NAME KEY [limits]`; empty lines and those that begin with # are left out. Several
    keys may have one name, as while a key is replaced. Raises ValueError with `source` and the line's number, without
    the key."""
    keys: list[ApiKey] = []
    for number, line in enumerate(re.split(r"[\n;]", text), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        try:
            keys.append(_parse_line(words))
        except ValueError as error:
            raise ValueError(f"{source}, line {number}: {error}") from None
    check_keys(keys, source)
    return tuple(keys)


def _parse_line(words: Sequence[str]) -> ApiKey:
    if len(words) < 2:
        raise ValueError(f"a line has a name and a key: {LINE_IN_WORDS}")
    name, key, *options = words
    allowed = [entry.name for entry in fields(KeyLimits)]
    limits: dict[str, int] = {}
    for option in options:
        limit, _, value = option.partition("=")
        if limit not in allowed or limit in limits or not value.isascii() or not value.isdigit() or int(value) < 1:
            raise ValueError(f"the words after the key of '{name}' are not limits; allowed: {LINE_IN_WORDS}, N above 0")
        limits[limit] = int(value)
    return ApiKey.of(name, key, KeyLimits(**limits))


def check_keys(keys: Sequence[ApiKey], source: str) -> None:
    """Refuse what has no meaning: one key with two names, one name with two sets of limits. Raises ValueError."""
    names: dict[bytes, str] = {}
    limits: dict[str, KeyLimits] = {}
    for key in keys:
        if key.digest in names:
            raise ValueError(f"{source}: '{names[key.digest]}' and '{key.name}' have the same key")
        if limits.setdefault(key.name, key.limits) != key.limits:
            raise ValueError(f"{source}: the keys of '{key.name}' have different limits")
        names[key.digest] = key.name


def load_keys(given: Sequence[str], files: Sequence[Path], variable: str | None) -> tuple[ApiKey, ...]:
    """All keys: `given` on the command line, which get the names key-1, key-2 and so on, those in `files`, and those in
    the environment variable's text. A file without a key is an error, since it would leave the door open. Raises
    ValueError with a sentence."""
    keys = [ApiKey.of(f"key-{number}", key) for number, key in enumerate(given, 1)]
    for path in files:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"the keys in {path} cannot be read: {getattr(error, 'strerror', 'not UTF-8')}") from None
        found = parse_keys(text, str(path))
        if not found:
            raise ValueError(f"{path} has no key; a line is {LINE_IN_WORDS}")
        keys += found
    if variable:
        keys += parse_keys(variable, KEYS_VARIABLE)
    check_keys(keys, "the keys")
    return tuple(keys)
