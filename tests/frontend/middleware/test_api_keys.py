"""API keys: what may be in a file, and who is let in."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_openai.middleware.api_keys import ApiKey, KeyLimits, find_key, load_keys, parse_keys
from dflash_openai.middleware.authentication import AuthenticationMiddleware
from tests.frontend.middleware.asgi import call, echo, error_of

ALICE, BOB = "alice-secret-key", "bob-secret-key"
KEYS = (ApiKey.of("alice", ALICE), ApiKey.of("bob", BOB))
APP = AuthenticationMiddleware(echo, KEYS)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_a_line_has_a_name_a_key_and_limits() -> None:
    text = f"# the teams\n\nalice {ALICE} requests_per_minute=60 max_concurrency=4\n  bob\t{BOB}\r\n"
    alice, bob = parse_keys(text, "keys")
    assert alice == ApiKey.of("alice", ALICE, KeyLimits(requests_per_minute=60, max_concurrency=4))
    assert bob == ApiKey.of("bob", BOB)
    assert parse_keys(f"alice {ALICE};bob {BOB}", "DFLASH_API_KEYS") == KEYS


@pytest.mark.parametrize(
    "line",
    [
        "alice",
        "alice short",
        "a\u00e9 long-enough-key",
        f"alice {ALICE} requests=5",
        f"alice {ALICE} max_concurrency=0",
        f"alice {ALICE} max_concurrency=-1",
        f"alice {ALICE} max_concurrency=1 max_concurrency=2",
        f"alice {ALICE} bob",
        f"x{ALICE}=a b={ALICE}",
    ],
)
def test_a_wrong_line_is_named_by_its_number_without_the_key(line: str) -> None:
    with pytest.raises(ValueError, match=r"^keys, line 2: ") as caught:
        parse_keys(f"bob {BOB}\n{line}", "keys")
    assert line.split()[-1] not in str(caught.value) or line in ("alice", f"alice {ALICE} bob")
    assert f" {ALICE}" not in str(caught.value)


def test_one_name_may_have_two_keys_while_one_replaces_the_other() -> None:
    keys = parse_keys(f"alice {ALICE}\nalice {BOB}", "keys")
    assert [key.name for key in keys] == ["alice", "alice"]
    with pytest.raises(ValueError, match="different limits"):
        parse_keys(f"alice {ALICE} max_concurrency=1\nalice {BOB}", "keys")


def test_two_names_may_not_have_one_key() -> None:
    with pytest.raises(ValueError, match="'alice' and 'bob' have the same key"):
        parse_keys(f"alice {ALICE}\nbob {ALICE}", "keys")


def test_keys_come_from_options_files_and_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"alice {ALICE}\n")
    keys = load_keys(["given-on-the-line"], [file], f"bob {BOB}")
    assert [key.name for key in keys] == ["key-1", "alice", "bob"]


def test_a_file_that_has_no_key_or_is_not_there_does_not_open_the_server(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# none yet\n")
    with pytest.raises(ValueError, match="has no key"):
        load_keys([], [tmp_path / "keys"], None)
    with pytest.raises(ValueError, match="No such file"):
        load_keys([], [tmp_path / "other"], None)


def test_the_key_is_neither_kept_nor_shown() -> None:
    assert ALICE not in repr(KEYS)
    assert repr(KEYS[0].digest) not in repr(KEYS)


def test_every_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []

    def compare(known: bytes, presented: bytes) -> bool:
        compared.append(known)
        return known == presented

    monkeypatch.setattr("dflash_openai.middleware.api_keys.hmac.compare_digest", compare)
    assert find_key(KEYS, ALICE) is KEYS[0]
    assert compared == [key.digest for key in KEYS], "also those behind the one that is found"


def test_a_key_names_its_tenant() -> None:
    response = call(APP, headers=bearer(BOB), content="{}")
    assert response.status_code == 200
    assert "name='bob'" in response.json()["state"]["api_key"]
    assert call(APP, headers={"authorization": f"bearer  {ALICE} "}).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer(""),
        bearer("wrong-secret-key"),
        bearer(ALICE[:-1]),
        {"authorization": ALICE},
        {"authorization": f"Basic {ALICE}"},
    ],
)
def test_without_a_right_key_there_is_a_401_that_repeats_nothing(headers: dict[str, str]) -> None:
    response = call(APP, headers=headers)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    error = error_of(response)
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
    assert "secret" not in response.text


@pytest.mark.parametrize("path", ["/health", "/health/live", "/health/ready", "/ping", "/", "/static/app.js"])
def test_health_and_the_page_need_no_key(path: str) -> None:
    assert call(APP, "GET", path).status_code == 200


@pytest.mark.parametrize("path", ["/metrics", "/v1/models", "/version", "/tokenize", "/health/", "//", "/openapi.json"])
def test_everything_else_does(path: str) -> None:
    assert call(APP, "GET", f"http://localhost:9000{path}").status_code == 401


def test_metrics_may_be_open() -> None:
    assert call(AuthenticationMiddleware(echo, KEYS, open_metrics=True), "GET", "/metrics").status_code == 200


def test_without_keys_all_are_let_in() -> None:
    response = call(AuthenticationMiddleware(echo, ()), headers=bearer("anything"))
    assert response.json()["state"]["api_key"] == "None"


def test_a_key_that_could_not_be_one_of_several_is_refused() -> None:
    """In the variable of keys a semicolon ends an entry: the front end would not start, after the model has loaded."""
    with pytest.raises(ValueError, match="without spaces and semicolons"):
        ApiKey.of("alice", "abcdefgh;ijklmnopqrst")
