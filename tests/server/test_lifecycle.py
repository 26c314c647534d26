"""How the server starts, refuses to start, and ends."""

from __future__ import annotations

import shutil

import pytest

from dflash_backend.config import asset_path
from dflash_cli.launcher.server import LauncherError
from dflash_client import DFlashClient
from load_tests.server_state import MetricsPage
from tests.server.conftest import new_server
from tests.support.scale import by_night
from tests.support.waiting import eventually


def test_a_bad_setting_in_the_file_stops_the_load(tmp_path):
    model = tmp_path / "dflash"
    shutil.copytree(asset_path("model_repository") / "dflash", model, ignore=shutil.ignore_patterns("__pycache__"))
    with (model / "config.pbtxt").open("a", encoding="utf-8") as config:
        config.write('parameters { key: "kv_blok_size" value { string_value: "32" } }\n')
    with pytest.raises(LauncherError, match=r"'kv_blok_size' \(config.pbtxt\); did you mean 'kv_block_size'\?"):
        new_server(model_repository=tmp_path).start()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        # tests/cli/test_serve_command.py has such a one, of the whole program.
        by_night({"target_model": "/nowhere/at/all"}, "there is no such directory; check the path"),
        ({"kv_cache_gb": "0.0000001"}, "the KV cache has no room for a single block"),
    ],
)
def test_a_model_that_cannot_be_loaded_says_what_to_do(settings, message):
    with pytest.raises(LauncherError, match=message):
        new_server(settings).start()


def test_request_timeout_s_ends_an_answer_with_what_there_is_and_the_reason_abort():
    """Over both protocols, at once and streamed; the metrics page counts them."""
    settings = {"request_timeout_s": "1", "max_model_len": "4096", "num_speculative_tokens": "0"}
    asked = {"temperature": 0, "max_tokens": 4000, "ignore_eos": True}
    with new_server(settings) as server:
        with (
            DFlashClient(server.grpc_url, "grpc", timeout_s=60) as grpc,
            DFlashClient(server.http_url, "http", timeout_s=60) as http,
        ):
            whole = grpc.generate("Tell me a story.", **asked)
            deltas = list(http.stream("Tell me a story.", **asked))
            short = grpc.generate("Hello", max_tokens=2, ignore_eos=True)
        assert whole.finish_reason == deltas[-1].finish_reason == "abort"
        assert short.finish_reason == "length"
        assert 0 < whole.num_output_tokens < 4000
        assert 0 < sum(delta.num_output_tokens for delta in deltas) < 4000

        def aborted() -> bool:
            page = MetricsPage.read(server.metrics_url)
            return page.value("dflash:request_success_total", finished_reason="abort") == 2

        eventually(aborted, "both are counted as abort")
