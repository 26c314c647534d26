"""Each option of `serve`, `openai` and the clients against what becomes of it: one setting, and no other."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_cli.commands.serve import _signals_stop, warnings
from dflash_cli.commands.serve_options import HOST_ENV, SETTING_OPTIONS
from dflash_cli.launcher.server import LauncherError
from dflash_cli.launcher.server_options import environment_with
from dflash_cli.main import main, parser
from dflash_openai.middleware.browser_guard import LOOPBACK_HOSTS
from tests.cli.test_security_options import pkcs8
from tests.client.tls_servers import Certificates

Found = dict[str, Any]
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
# Options, their values, and what differs from a server without options. CERT, KEY and CA stand for files, as KEYS,
# MORE and TEMPLATE do; TLS for the HTTPS of the first three.
CASES: dict[str, tuple[list[str], Found]] = {
    "MODEL": (["a/model"], {"setting.target_model": "a/model"}),
    "--target": (["t"], {"setting.target_model": "t"}),
    "--draft": (["d"], {"setting.draft_model": "d"}),
    "--lora-modules": (["a=b", "c=d=e"], {"setting.lora_modules": '{"a": "b", "c": "d=e"}'}),
    "--revision": (["r"], {"setting.target_revision": "r"}),
    "--draft-revision": (["s"], {"setting.draft_revision": "s"}),
    "--max-model-len": (["3000"], {"setting.max_model_len": "3000"}),
    "--max-num-seqs": (["7"], {"setting.max_num_seqs": "7"}),
    "--dtype": (["float32"], {"setting.dtype": "float32"}),
    "--set": (
        ["max_queue_size=9", "--set", "max_num_seqs=3"],
        {"setting.max_queue_size": "9", "setting.max_num_seqs": "3"},
    ),
    "--model-name": (["named"], {"server.model_name": "named", "config.model_name": "named"}),
    "--served-model-name": (["one", "two"], {"config.served_model_names": ("one", "two")}),
    "--tool-call-parser": (["hermes"], {"config.tool_call_parser": "hermes"}),
    "--reasoning-parser": (["qwen3"], {"config.reasoning_parser": "qwen3"}),
    "--chat-template": (["TEMPLATE"], {"config.chat_template": TEMPLATE}),
    "--trust-request-chat-template": ([], {"config.trust_request_chat_template": True}),
    "--reject-unknown-fields": ([], {"config.reject_unknown_fields": True}),
    "--return-tokens-as-token-ids": ([], {"config.return_tokens_as_token_ids": True}),
    "--enable-force-include-usage": ([], {"config.enable_force_include_usage": True}),
    "--host": (["0.0.0.0"], {"server.host": "0.0.0.0", "front_end.host": "0.0.0.0", "security.allowed_hosts": None}),
    "--triton-host": (["127.0.0.3"], {"server.host": "127.0.0.3"}),
    "--metrics-host": (["127.0.0.4"], {"server.metrics_host": "127.0.0.4"}),
    "--port": (["9100"], {"front_end.port": 9100}),
    "--http-port": (["9101"], {"server.http_port": 9101}),
    "--grpc-port": (["9102"], {"server.grpc_port": 9102}),
    "--metrics-port": (["9103"], {"server.metrics_port": 9103}),
    "--explicit": ([], {"server.explicit": True}),
    "--allow-api": (["trace", "--allow-api", "logging"], {"server.allow_apis": ["trace", "logging"]}),
    "--load-timeout": (["11"], {"server.ready_timeout_s": 11.0}),
    "--exit-timeout": (["12"], {"server.exit_timeout_s": 12, "config.drain_timeout_s": 12.0}),
    "--hang-timeout": (["13"], {"keeper.hang_timeout_s": 13.0, "front_end.hang_timeout_s": 13.0}),
    "--no-restart": ([], {"keeper.restart": False}),
    "--verbose": ([], {"log.verbose": True}),
    "--api-key-file": (
        ["KEYS", "--api-key-file", "MORE"],
        {"security.api_keys": ["team-a", "team-b"], "security.allowed_hosts": None},
    ),
    "--api-key": (
        ["a-key-of-one", "--api-key", "a-key-of-another"],
        {"security.api_keys": ["key-1", "key-2"], "security.allowed_hosts": None},
    ),
    "--key-requests-per-minute": (["14"], {"limits.requests_per_minute": 14}),
    "--key-prompt-tokens-per-minute": (["15"], {"limits.prompt_tokens_per_minute": 15}),
    "--key-max-concurrency": (["16"], {"limits.max_concurrency": 16}),
    "--open-metrics": ([], {"security.open_metrics": True}),
    "--max-body-mb": (["2.5"], {"security.max_body_bytes": 2621440}),
    "--body-timeout": (["17"], {"security.body_timeout_s": 17.0}),
    "--write-timeout": (["18"], {"security.write_timeout_s": 18.0}),
    "--keep-alive-timeout": (["20.5"], {"security.keep_alive_timeout_s": 20.5}),
    "--ping-interval": (["0"], {"config.ping_interval_s": 0.0}),
    "--max-prompt-tokens": (["19"], {"security.max_prompt_tokens": 19}),
    "--allowed-origins": (
        ["https://a.example", "https://b.example"],
        {"security.allowed_origins": ("https://a.example", "https://b.example")},
    ),
    "--allowed-hosts": (["B.example", "c.example"], {"security.allowed_hosts": {"b.example", "c.example"}}),
    "--no-access-log": ([], {"security.access_log": False}),
    "--otlp-traces-endpoint": (["http://t.example"], {"config.tracer": "http://t.example"}),
    "--tls-cert": (["CERT", "--tls-key", "KEY"], {"security.tls": ("CERT", "KEY", None)}),
    "--tls-key": (["KEY", "--tls-cert", "CERT"], {"security.tls": ("CERT", "KEY", None)}),
    "--tls-client-ca": (["CA", "--tls-cert", "CERT", "--tls-key", "KEY"], {"security.tls": ("CERT", "KEY", "CA")}),
    "--": (["--log-verbose=1"], {"server.extra_options": ["--log-verbose=1"]}),
}
# Those of `openai` alone; all others are in `CASES`.
OPENAI: dict[str, tuple[list[str], Found]] = {
    "--triton": (["grpc://a:1", "--triton", "b:2"], {"config.triton_urls": ("grpc://a:1", "b:2")}),
    "--prefill": (["grpc://a:1", "--prefill", "b:2"], {"config.prefill_urls": ("grpc://a:1", "b:2")}),
    "--triton-ca-cert": (["CA"], {"tls.ca_cert": "CA"}),
    "--triton-client-cert": (
        ["CERT", "--triton-client-key", "KEY"],
        {"tls.client_cert": "CERT", "tls.client_key": "KEY"},
    ),
    "--triton-client-key": (
        ["KEY", "--triton-client-cert", "CERT"],
        {"tls.client_cert": "CERT", "tls.client_key": "KEY"},
    ),
    "--triton-metrics": (
        ["http://a:1/metrics", "--triton-metrics", "http://b:2/metrics"],
        {"config.triton_metrics_urls": ("http://a:1/metrics", "http://b:2/metrics")},
    ),
    "--model-name": (["named"], {"config.model_name": "named"}),
    "--tokenizer": (["folder"], {"config.tokenizer": "folder"}),
    "--host": (["127.0.0.5"], {"config.host": "127.0.0.5", "security.allowed_hosts": LOOPBACK_HOSTS | {"127.0.0.5"}}),
    "--port": (["9104"], {"config.port": 9104}),
    "--request-timeout": (["21"], {"config.request_timeout_s": 21.0}),
    "--drain-timeout": (["22"], {"config.drain_timeout_s": 22.0}),
    "--heartbeat-fd": (["23"], {"config.heartbeat_fd": 23}),
    "--start-fd": (["24"], {"start_fd": 24}),
}
# With these the front end is left out, which cannot reach an encrypted server.
GRPC_TLS: dict[str, tuple[list[str], Found]] = {
    "--grpc-tls-cert": (["CERT", "--grpc-tls-key", "KEY"], {"server.tls": ("CERT", "KEY", None)}),
    "--grpc-tls-key": (["KEY", "--grpc-tls-cert", "CERT"], {"server.tls": ("CERT", "KEY", None)}),
    "--grpc-tls-client-ca": (
        ["CA", "--grpc-tls-cert", "CERT", "--grpc-tls-key", "KEY"],
        {"server.tls": ("CERT", "KEY", "CA")},
    ),
}


def actions_of(command: str) -> list[argparse.Action]:
    """The options of a sub-command."""
    (commands,) = [each for each in parser()._actions if isinstance(each, argparse._SubParsersAction)]
    return [each for each in commands.choices[command]._actions if each.option_strings]


def options_of(command: str) -> dict[str, list[str]]:
    """All option strings of a sub-command, by the name of each that is not an alias."""
    return {each.option_strings[0]: list(each.option_strings) for each in actions_of(command)}


ALIASES = [(name, alias) for name, names in options_of("serve").items() for alias in names[1:] if name not in ("-h",)]


def named(tls: Any) -> tuple[str | None, ...] | None:
    """The files of TLS."""
    return tls and tuple(path and str(path) for path in dataclasses.astuple(tls))


class Parts:
    """What `serve` makes of a command line, and the front end of what it is handed. Nothing starts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: Found = {}
        self._front_end: tuple[list[str], dict[str, str]] | None = None
        for name in (HOST_ENV, "DFLASH_API_KEYS"):
            monkeypatch.delenv(name, raising=False)
        self._monkeypatch = monkeypatch
        for place, stand_in in {
            "launcher.server.TritonServer": self._server,
            "launcher.frontend.FrontendProcess": self._process,
            "launcher.restarts.Keeper": self._keeper,
            "launcher.triton_install.find_triton": lambda environ: SimpleNamespace(is_embedded=False),
            "commands.serve.ServeLog": self._log,
            "commands.openai._tracer": lambda endpoint: endpoint,
            "commands.openai._wait_for_start": lambda fd: self.found.update(start_fd=fd),
        }.items():
            monkeypatch.setattr(f"dflash_cli.{place}", stand_in)
        monkeypatch.setattr("dflash_openai.app.create_app", self._app)

    def _server(self, settings: dict[str, str], **given: Any) -> Any:
        given["tls"] = named(given["tls"])
        for name in ("environ", "on_progress", "on_log"):
            given.pop(name)
        self.found |= {f"setting.{name}": value for name, value in settings.items()}
        self.found |= {f"server.{name}": value for name, value in given.items()}
        settled = {"settle_ports": lambda: None, "grpc_url": "", "metrics_url": ""}
        return SimpleNamespace(serves_demo_pair=not settings, stop=lambda: None, **settled)

    def _process(
        self, host: str, port: int, options: list[str], environ: dict[str, str], say: Any, tls: Any, hang_s: float
    ) -> Any:
        self.found |= {"front_end.host": host, "front_end.port": port, "front_end.hang_timeout_s": hang_s}
        self._front_end = ["--host", host, "--port", "0", *options], environ
        started = {"launch": lambda grpc_url, metrics_url: None, "drain": lambda: None, "stop": lambda: None}
        return SimpleNamespace(ready_url="ready", keep=None, **started)

    def _keeper(self, server: Any, **given: Any) -> Any:
        self.found |= {f"keeper.{name}": given[name] for name in ("restart", "hang_timeout_s")}
        return SimpleNamespace(run=self._end, signalled=lambda: None)

    def _log(self, lines: Any, verbose: bool) -> Any:
        self.found["log.verbose"] = verbose
        return SimpleNamespace(progress=None)

    def _end(self, on_ready: Callable[[], None]) -> None:
        raise LauncherError("as far as this")

    def _app(self, config: Any) -> Any:
        security = config.security
        left_out = ("security", "triton_tls", *(("host", "port") if self._front_end is not None else ()))
        self.found |= {f"config.{name}": value for name, value in vars(config).items() if name not in left_out}
        self.found |= {f"tls.{name}": value for name, value in dataclasses.asdict(config.triton_tls).items()}
        of_security = dict(vars(security))
        self.found |= {f"limits.{name}": value for name, value in vars(of_security.pop("key_limits")).items()}
        of_security["api_keys"] = [key.name for key in security.api_keys]
        of_security["tls"] = named(security.tls)
        self.found |= {f"security.{name}": value for name, value in of_security.items()}
        raise ValueError("as far as this")

    def of(self, words: list[str]) -> Found:
        """By name, from the server, the front end and all that is between."""
        self.found, self._front_end = {}, None
        assert main(["serve", *words]) == 1
        if self._front_end is not None:
            options, environ = self._front_end
            with self._monkeypatch.context() as patch:
                for name in set(environ) - set(os.environ):
                    patch.setenv(name, environ[name])
                assert main(["openai", *options]) == 2
        return self.found

    def of_openai(self, words: list[str]) -> Found:
        """What the front end is told by a command line of its own."""
        self.found, self._front_end = {}, None
        assert main(["openai", *(() if "--port" in words else ("--port", "0")), *words]) == 2
        return self.found


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("options")
    made = Certificates.make(folder)
    pkcs8(made.server_key)
    (folder / "keys").write_text("team-a key-of-team-a\n")
    (folder / "more").write_text("team-b key-of-team-b\n")
    (folder / "template").write_text(TEMPLATE)
    paths = {"CERT": made.server, "KEY": made.server_key, "CA": made.ca}
    return {name: str(Path(path)) for name, path in paths.items()} | {
        "KEYS": str(folder / "keys"),
        "MORE": str(folder / "more"),
        "TEMPLATE": str(folder / "template"),
    }


@pytest.fixture(scope="module")
def bases() -> dict[int, Found]:
    """What there is without an option, by the number of words that each case has beside."""
    return {}


def with_files(value: Any, files: dict[str, str]) -> Any:
    """The value with the names of files in place."""
    if isinstance(value, list | tuple):
        return type(value)(with_files(each, files) for each in value)
    return files.get(value, value) if isinstance(value, str) else value


def words_of(option: str, case: str) -> list[str]:
    values = (CASES | GRPC_TLS)[case][0]
    return values if case == "MODEL" else [option, *values]


def test_every_option_has_a_case() -> None:
    assert {*options_of("serve"), "MODEL", "--"} - {"-h", "--version"} == set(CASES | GRPC_TLS)


@pytest.mark.parametrize(
    ("option", "case"), [*((name, name) for name in (*CASES, *GRPC_TLS)), *((alias, name) for name, alias in ALIASES)]
)
def test_an_option_becomes_its_setting_and_no_other(
    option: str, case: str, files: dict[str, str], bases: dict[int, Found], monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = Parts(monkeypatch)
    alone = ["--port", "0"] if case in GRPC_TLS else []
    without = bases.get(len(alone)) or bases.setdefault(len(alone), parts.of(alone))
    found = parts.of([*alone, *with_files(words_of(option, case), files)])
    differs = {name: value for name, value in found.items() if name not in without or without[name] != value}
    assert without.keys() <= found.keys()
    assert differs == {name: with_files(value, files) for name, value in (CASES | GRPC_TLS)[case][1].items()}


@pytest.mark.parametrize("command", ["serve", "openai"])
def test_an_option_that_takes_several_values_has_a_case_with_two(command: str) -> None:
    cases = CASES | (OPENAI if command == "openai" else {})
    for action in actions_of(command):
        if isinstance(action, argparse._AppendAction) or action.nargs in ("+", "*"):
            values, _ = cases[action.option_strings[0]]
            assert len([each for each in values if each != action.option_strings[0]]) == 2, action.option_strings


def test_every_option_of_openai_has_a_case() -> None:
    own = {name for name in CASES if name in options_of("openai")}
    assert {*options_of("openai")} - {"-h"} == own | OPENAI.keys()


@pytest.mark.parametrize(
    "option", [*OPENAI, *(name for name in CASES if name in options_of("openai") and name not in OPENAI)]
)
def test_an_option_of_openai_becomes_its_setting_and_no_other(
    option: str, files: dict[str, str], bases: dict[int, Found], monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = Parts(monkeypatch)
    values, expected = (CASES | OPENAI)[option]
    alone = ["--triton", "grpcs://a:1"] if "--triton-c" in option else []
    found = parts.of_openai([*alone, *with_files([option, *values], files)])
    # Apart from those of `serve`, which have no or two words.
    key = 3 + len(alone)
    without = dict(bases.get(key) or bases.setdefault(key, parts.of_openai(alone)))
    if option != "--port":
        # Any free one, another each time.
        del found["config.port"], without["config.port"]
    differs = {name: value for name, value in found.items() if name not in without or without[name] != value}
    assert differs == {name: with_files(value, files) for name, value in expected.items()}


CONNECTION: dict[str, tuple[list[str], Found]] = {
    "--url": (["http://a:1"], {"url": "http://a:1"}),
    "--protocol": (["http"], {"protocol": "http"}),
    "--model-name": (["named"], {"model": "named"}),
    "--timeout": (["31"], {"timeout_s": 31.0}),
    "--retries": (["4"], {"retries": 4}),
    "--api-key": (["k"], {"api_key": "k"}),
    "--header": (["A: b:c", "--header", "D:e"], {"headers": {"A": "b:c", "D": "e"}}),
    "--ca-cert": (["x"], {"ca_cert": "x"}),
    "--client-cert": (["y"], {"client_cert": "y"}),
    "--client-key": (["z"], {"client_key": "z"}),
}


@pytest.mark.parametrize("command", ["generate", "chat"])
@pytest.mark.parametrize("option", CONNECTION)
def test_an_option_of_a_client_becomes_its_argument_and_no_other(
    option: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def client(url: str, protocol: str, model: str, timeout_s: float, retries: int, **more: Any) -> Any:
        found.update({"url": url, "protocol": protocol, "model": model, "timeout_s": timeout_s, "retries": retries})
        found.update(more)
        raise ValueError("as far as this")

    monkeypatch.setattr("dflash_client.DFlashClient", client)
    monkeypatch.delenv("DFLASH_API_KEY", raising=False)
    found: Found = {}
    prompt = ["Hi"] if command == "generate" else []
    assert main([command, *prompt]) == 2
    without = dict(found)
    assert main([command, *prompt, option, *CONNECTION[option][0]]) == 2
    assert {name: value for name, value in found.items() if without[name] != value} == CONNECTION[option][1]


@pytest.mark.parametrize("option", ["--max-model-len", "--max-num-seqs", "--dtype"])
def test_a_wrong_value_is_told_of_the_option_that_it_came_by(
    option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Parts(monkeypatch)
    assert main(["serve", option, "-1"]) == 2
    name = option[2:].replace("-", "_")
    assert f"setting '{name}' has the value '-1' ({option}); allowed: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "variable", "message"),
    [
        (["--chat-template", "/no/such/file"], "", "--chat-template: /no/such/file cannot be read: No such file"),
        (["--tool-call-parser", "xml"], "", "--tool-call-parser has the value 'xml'; allowed: auto, none, hermes"),
        (["--reasoning-parser", "xml"], "", "--reasoning-parser has the value 'xml'; allowed: auto, none, "),
        (["--otlp-traces-endpoint", "here"], "", "spans cannot be sent to 'here'; allowed: a URL of HTTP, such as"),
        ([], "localhost:4318", "spans cannot be sent to 'localhost:4318/v1/traces'; allowed"),
    ],
)
def test_what_the_front_end_would_end_of_is_refused_before_the_model_loads(
    words: list[str], variable: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It starts once the model has loaded, which may take half an hour."""
    parts = Parts(monkeypatch)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", variable)
    assert main(["serve", *words]) == 2
    assert message in capsys.readouterr().err
    assert not any(name.startswith(("server.", "keeper.")) for name in parts.found)


@pytest.mark.parametrize(
    "option", ["--api-key-file=keys", "--api-key=a-key-of-18-bytes", "--tls-cert=c", "--tls-key=k", "--tls-client-ca=c"]
)
def test_what_protects_the_front_end_is_refused_without_one(
    option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else the operator takes Triton's own ports for protected."""
    parts = Parts(monkeypatch)
    assert main(["serve", "--port", "0", "--host", "0.0.0.0", option]) == 2
    assert f"{option.partition('=')[0]} is for the OpenAI API, which --port 0 leaves out" in capsys.readouterr().err
    assert not any(name.startswith(("server.", "keeper.")) for name in parts.found)


def test_keys_of_the_environment_have_a_warning_without_a_front_end(monkeypatch: pytest.MonkeyPatch) -> None:
    Parts(monkeypatch)
    monkeypatch.setenv("DFLASH_API_KEYS", "team-a a-key-of-18-bytes")
    found = {port: list(warnings(parser().parse_args(["serve", "--port", port]))) for port in ("0", "9000")}
    assert found["9000"] == []
    assert "DFLASH_API_KEYS has no effect" in found["0"][0]


# What there is to say of these without a front end is an error.
PROTECTING = ("--api-key", "--api-key-file", "--tls-cert", "--tls-key", "--tls-client-ca")


@pytest.mark.parametrize("option", [*CASES, *GRPC_TLS])
def test_an_option_of_the_front_end_has_a_warning_without_one(
    option: str, files: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of those that are its alone: by what it is told of them."""
    if option in (*PROTECTING, "--", "--port"):
        return
    Parts(monkeypatch)
    found = list(warnings(parser().parse_args(["serve", "--port", "0", *with_files(words_of(option, option), files)])))
    is_its = all(name.startswith(("config.", "security.", "limits.")) for name in (CASES | GRPC_TLS)[option][1])
    assert [f"for which these options are: {option}" in line for line in found if "--port 0" in line] == [True] * is_its


def test_a_setting_of_the_command_line_wins_over_the_environments() -> None:
    """Of another name the environment's stays."""
    environ = {"DFLASH_MAX_NUM_SEQS": "3", "DFLASH_MAX_MODEL_LEN": "2048", "HOME": "/h"}
    found = environment_with(environ, {"max_num_seqs": "9", "dtype": "float32"})
    assert found == {**environ, "DFLASH_MAX_NUM_SEQS": "9", "DFLASH_DTYPE": "float32"}


def test_models_are_found_from_the_folder_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton runs in another one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    found = environment_with({}, {"target_model": "here", "lora_modules": '{"a": "here", "b": "owner/there"}'})
    assert found["DFLASH_TARGET_MODEL"] == str(tmp_path / "here")
    assert json.loads(found["DFLASH_LORA_MODULES"]) == {"a": str(tmp_path / "here"), "b": "owner/there"}


@pytest.mark.parametrize(
    ("words", "name"),
    [
        *((["--" + name.replace("_", "-"), "7", "--set", f"{name}=8"], name) for name in SETTING_OPTIONS),
        (["--target", "a", "--set", "target_model=b"], "target_model"),
        (["a", "--set", "target_model=b"], "target_model"),
        (["--draft", "a", "--set", "draft_model=b"], "draft_model"),
        (["--lora-modules", "a=b", "--set", "lora_modules={}"], "lora_modules"),
        (["--lora-modules", "a=b", "a=c"], "the adapter 'a'"),
        (["--revision", "a", "--set", "target_revision=b"], "target_revision"),
        (["--draft-revision", "a", "--set", "draft_revision=b"], "draft_revision"),
        (["a", "--target", "b"], "the model"),
    ],
)
def test_a_setting_that_is_given_twice_is_refused(
    words: list[str], name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whichever won, the other would be lost without a word."""
    Parts(monkeypatch)
    assert main(["serve", *words]) == 2
    assert f"{name} is given twice" in capsys.readouterr().err


def test_what_is_served_is_said_where_no_model_is_named(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("DFLASH_TARGET_MODEL", "DFLASH_DRAFT_MODEL"):
        monkeypatch.delenv(name, raising=False)
    parts, words = Parts(monkeypatch), "no MODEL is given: this serves the demo pair"
    for options, said in ([], True), (["--draft", "ngram"], True), (["--draft", "d"], False), (["m"], False):
        parts.of(options)
        assert (words in capfd.readouterr().err) == said, options


@pytest.mark.parametrize("ignored", [False, True])
def test_the_end_of_a_session_stops_a_server_unless_nohup_started_it(ignored: bool) -> None:
    signals: list[int] = []
    keeper: Any = SimpleNamespace(signalled=lambda: signals.append(1))
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        with _signals_stop(keeper):
            os.kill(os.getpid(), signal.SIGHUP if ignored else signal.SIGTERM)
            assert (signal.getsignal(signal.SIGHUP) == signal.SIG_IGN) == ignored
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert len(signals) == (0 if ignored else 2)
