"""Options of the front end's keys, limits, HTTPS and answers, as `openai` reads them and as `serve` hands them on."""

from __future__ import annotations

import argparse
from pathlib import Path
from time import time as real_time

import pytest

from dflash_cli.commands.arguments import add_answer_options
from dflash_cli.commands.security_options import (
    add_security_options,
    as_options,
    keys_environ,
    security_config,
    security_warnings,
)
from dflash_cli.commands.serve import triton_host
from dflash_openai.middleware.api_keys import KeyLimits, find_key
from dflash_openai.security import SecurityConfig
from tests.client.tls_servers import Certificates

ANSWER_FLAGS = (
    "reject_unknown_fields",
    "trust_request_chat_template",
    "return_tokens_as_token_ids",
    "enable_force_include_usage",
)
KEY = "a-key-of-the-command-line"


def parse(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--triton-host")
    parser.add_argument("--port", type=int, default=9000)
    add_security_options(parser)
    add_answer_options(parser)
    return parser.parse_args(argv)


def config(*argv: str, local: bool = True, **environ: str) -> SecurityConfig:
    return security_config(parse(*argv), local, environ)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    made = Certificates.make(tmp_path_factory.mktemp("certificates"))
    pkcs8(made.server_key)
    return made


def pkcs8(path: Path) -> None:
    """Rewrite a key in PKCS #8."""
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
        load_pem_private_key,
    )

    key = load_pem_private_key(path.read_bytes(), None)
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))


def test_without_options_a_local_server_is_open_to_local_names_alone() -> None:
    made = config()
    assert made.api_keys == ()
    assert made.allowed_hosts == {"localhost", "127.0.0.1", "::1"}
    assert config("--allowed-hosts", "Model.example").allowed_hosts == {"model.example"}
    assert config("--api-key", KEY).allowed_hosts is None, "a page of another site does not know the key"
    assert config(local=False).allowed_hosts is None


def test_limits_and_keys_are_read(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("team-a key-of-team-a max_concurrency=2\n")
    made = config(
        *("--api-key-file", str(file), "--api-key", KEY, "--key-requests-per-minute", "60", "--max-body-mb", "0.5"),
        DFLASH_API_KEYS="team-b key-of-team-b",
    )
    assert [key.name for key in made.api_keys] == ["key-1", "team-a", "team-b"]
    assert made.key_limits == KeyLimits(requests_per_minute=60)
    assert made.max_body_bytes == 2**19


def test_serve_hands_everything_on_without_keys_on_the_command_line(tmp_path: Path, certificates: Certificates) -> None:
    file = tmp_path / "keys"
    file.write_text("team-a key-of-team-a\n")
    argv = [
        *("--api-key", KEY, "--api-key-file", str(file), "--key-requests-per-minute", "5", "--open-metrics"),
        *("--key-prompt-tokens-per-minute", "6", "--key-max-concurrency", "7", "--max-prompt-tokens", "8"),
        *("--max-body-mb", "1", "--body-timeout", "2", "--write-timeout", "3", "--no-access-log"),
        *("--allowed-origins", "https://a.example", "https://b.example", "--allowed-hosts", "c.example"),
        *("--tls-cert", str(certificates.server), "--tls-key", str(certificates.server_key)),
        *("--tls-client-ca", str(certificates.ca)),
    ]
    given = parse(*argv)
    options, environ = as_options(given), keys_environ(given, {"DFLASH_API_KEYS": "team-b key-of-team-b"})
    assert KEY not in " ".join(options)
    handed_on = security_config(parse(*options), True, environ)
    at_once = security_config(given, True, {"DFLASH_API_KEYS": "team-b key-of-team-b"})
    assert {key.digest for key in handed_on.api_keys} == {key.digest for key in at_once.api_keys}
    found = find_key(handed_on.api_keys, KEY)
    assert found is not None
    assert found.name == "key-1"
    assert vars(handed_on) | {"api_keys": 0} == vars(at_once) | {"api_keys": 0}


@pytest.mark.parametrize("reject", [True, False])
def test_serve_hands_on_how_requests_are_read_and_answers_written(reject: bool) -> None:
    words = ["--tool-call-parser", "mistral", "--reasoning-parser", "qwen3", "--chat-template=-{{ x }}"]
    given = parse(*words, *([f"--{flag.replace('_', '-')}" for flag in ANSWER_FLAGS] * reject))
    parser = argparse.ArgumentParser()
    add_answer_options(parser)
    assert vars(parser.parse_args(as_options(given))) == {
        "tool_call_parser": "mistral",
        "reasoning_parser": "qwen3",
        "chat_template": "-{{ x }}",
        **dict.fromkeys(ANSWER_FLAGS, reject),
    }


def test_triton_checks_no_keys_so_with_keys_it_stays_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DFLASH_API_KEYS", raising=False)
    public = ("--host", "0.0.0.0")
    assert triton_host(parse(*public)) == "0.0.0.0"
    assert triton_host(parse(*public, "--api-key", KEY)) == "127.0.0.1"
    assert triton_host(parse(*public, "--api-key", KEY, "--triton-host", "10.0.0.1")) == "10.0.0.1"
    assert triton_host(parse(*public, "--api-key", KEY, "--port", "0")) == "0.0.0.0", "no front end asks for it"
    monkeypatch.setenv("DFLASH_API_KEYS", "team-b key-of-team-b")
    assert triton_host(parse(*public)) == "127.0.0.1"


def test_the_operator_is_told_of_a_server_that_is_open_to_others() -> None:
    assert list(security_warnings(config(), is_loopback=True)) == []
    (warning,) = security_warnings(config(local=False), is_loopback=False)
    assert "without a key" in warning
    (warning,) = security_warnings(config("--api-key", KEY, local=False), is_loopback=False)
    assert "in the clear" in warning


def test_the_operator_is_told_of_files_that_others_read_and_certificates_out_of_date(
    certificates: Certificates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"team-a {KEY}\n")
    keys.chmod(0o600)
    certificates.server_key.chmod(0o600)
    tls = ("--tls-cert", str(certificates.server), "--tls-key", str(certificates.server_key))

    def warnings() -> list[str]:
        return list(security_warnings(config(*tls, "--api-key-file", str(keys)), is_loopback=True, key_files=[keys]))

    assert warnings() == []
    for path in (keys, certificates.server_key):
        path.chmod(0o644)
        (warning,) = warnings()
        assert (
            warning
            == f"WARNING: other users of this machine may read or change {path}; chmod 600 keeps it to its owner"
        )
        path.chmod(0o640)
        assert warnings() == []
    years = 365 * 24 * 3600 * 2000
    monkeypatch.setattr("dflash_openai.security.time.time", lambda: real_time() + years)
    (warning,) = warnings()
    assert f"the certificate in {certificates.server} expired on " in warning
    monkeypatch.setattr("dflash_openai.security.time.time", lambda: 1.0)
    (warning,) = warnings()
    assert "is not valid before" in warning


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--api-key-file", "/nowhere"], "cannot be read: No such file"),
        (["--api-key", "short"], "at least 8 printable"),
        (["--tls-cert", "cert.pem"], "needs both"),
        (["--tls-cert", "/nowhere", "--tls-key", "/nowhere"], "--tls-cert: /nowhere cannot be read: No such file"),
        (["--tls-cert", "SELF", "--tls-key", "/nowhere"], "--tls-key: /nowhere cannot be read: No such file"),
    ],
)
def test_what_cannot_be_used_ends_the_command(cli, argv: list[str], words: str) -> None:
    # Any file in ASCII: that it is no certificate is found later.
    ended = cli("openai", "--port", "0", *(word.replace("SELF", __file__) for word in argv))
    assert ended.status == 2
    assert words in ended.err


def test_certificates_are_checked_before_anything_listens(certificates: Certificates) -> None:
    for cert, key, words in (
        (certificates.server, certificates.client_key, "openssl pkcs8"),
        (certificates.client, certificates.server_key, "are not a certificate and its key"),
        (certificates.server_key, certificates.server_key, "are not a certificate and its key"),
    ):
        with pytest.raises(ValueError, match=words):
            config("--tls-cert", str(cert), "--tls-key", str(key))
