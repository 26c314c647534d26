"""Models are loaded, unloaded and replaced while the server runs; several models and instances share a server."""

from __future__ import annotations

import glob
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from dflash_cli.launcher.processes import family
from dflash_cli.launcher.server import TritonServer
from dflash_client import DFlashClient
from dflash_client.errors import ClientError
from load_tests.server_state import MetricsPage, engine_pids
from tests.server.conftest import new_server
from tests.support.scale import NIGHTLY_SCALE, SCALE, scaled
from tests.support.servers import answers, change_model
from tests.support.waiting import eventually

# Each starts an engine; `make nightly` has eight. The tests before have reloaded the model as well.
RELOADS = scaled(2) if SCALE > 1 else 1
BAD_LOADS = 2 if SCALE > 1 else 1  # before one that is good
# Further models of the server whose model is loaded and unloaded.
MORE_MODELS = {"plain": {"num_speculative_tokens": "0"}}
# Resident memory of the server's own process may differ by so much from one load to a much later one.
MAX_GROWTH = 0.05


@pytest.fixture(scope="module")
def two_models() -> Iterator[TritonServer]:
    with new_server(explicit=True, more_models=MORE_MODELS) as server:
        yield server


@pytest.fixture(scope="module")
def explicit(request: pytest.FixtureRequest) -> Iterator[TritonServer]:
    """A server with one model; by night the other ones of `two_models` have been loaded and unloaded."""
    if SCALE < NIGHTLY_SCALE:
        with new_server(explicit=True) as server:
            yield server
        return
    server = request.getfixturevalue("two_models")
    for name in MORE_MODELS:
        assert change_model(server, "unload", name).is_success
    eventually(lambda: len(family(server.pid)) == 3, "their stubs and engines end")
    yield server


@pytest.fixture(scope="module")
def held_at_first(explicit: TritonServer) -> dict[str, int]:
    with DFlashClient(explicit.http_url, "http", timeout_s=60) as client:
        client.generate("Hello", max_tokens=2, ignore_eos=True)
        return held_by(explicit)


@pytest.fixture
def client(explicit: TritonServer, held_at_first: dict[str, int]) -> Iterator[DFlashClient]:
    with DFlashClient(explicit.http_url, "http", timeout_s=60) as client:
        if not ready(explicit):
            change_model(explicit, "load")
        yield client


def ready(server: TritonServer) -> bool:
    return answers(server.http_url)


def unload(server: TritonServer) -> None:
    assert change_model(server, "unload").is_success
    eventually(lambda: engine_pids(server.pid) == [], "the engine ends")


def value(server: TritonServer, name: str, model: str = "dflash") -> float:
    """A metric of a model, summed over its labels."""
    return MetricsPage.read(server.metrics_url, model).value(name)


def held_by(server: TritonServer) -> dict[str, int]:
    """What the server holds on to: processes, descriptors and shared memory by number, resident memory in KiB."""
    process = psutil.Process(server.pid)
    return {
        "processes": len(family(server.pid)),
        "descriptors": process.num_fds(),
        "segments": len(glob.glob(server._running_files().segments_pattern)),
        "rss": process.memory_info().rss >> 10,
    }


def test_two_models_of_one_server_each_have_their_settings_and_their_metrics(two_models):
    with DFlashClient(two_models.http_url, "http", timeout_s=60) as drafted:
        one = drafted.generate("What is 5 + 6?", temperature=0, max_tokens=24)
    with DFlashClient(two_models.http_url, "http", model="plain", timeout_s=60) as plain:
        other = plain.generate("What is 5 + 6?", temperature=0, max_tokens=24)
    assert one.text == other.text
    models, name = ("dflash", "plain"), "dflash:request_success_total"
    eventually(lambda: [value(two_models, name, model) for model in models] == [1, 1], "both are counted")
    drafts = [value(two_models, "dflash:spec_decode_num_drafts_total", model) for model in models]
    assert drafts[0] > drafts[1] == 0


def test_a_model_that_is_loaded_again_while_it_serves_is_replaced_and_its_counters_go_on(explicit, client):
    client.generate("Hello", max_tokens=3, ignore_eos=True)
    name = "dflash:generation_tokens_total"
    before = engine_pids(explicit.pid)
    eventually(lambda: value(explicit, name) > 0, "it is counted")
    touch_model(explicit)
    assert change_model(explicit, "load").is_success
    eventually(lambda: len(engine_pids(explicit.pid)) == 1 and engine_pids(explicit.pid) != before, "it is replaced")
    counted = value(explicit, name)
    client.generate("Hello", max_tokens=5, ignore_eos=True)
    eventually(lambda: value(explicit, name) == counted + 5, "it is counted")
    eventually(lambda: value(explicit, "dflash:engine_ready") == 1, "the gauge is the new engine's")


def test_a_load_that_fails_leaves_the_model_that_serves_and_the_server_alone(explicit, client):
    config = explicit.folder / "models" / "dflash" / "config.pbtxt"
    good = config.read_text(encoding="utf-8")
    bad = good.replace(
        'key: "target_model" value { string_value: "" }', 'key: "target_model" value { string_value: "/etc" }'
    )
    assert bad != good
    eventually(lambda: len(engine_pids(explicit.pid)) == 1, "the engine that was replaced has ended")
    before = engine_pids(explicit.pid)
    try:
        for number in range(BAD_LOADS):
            config.write_text(bad, encoding="utf-8")
            refused = change_model(explicit, "load")
            assert refused.status_code == 400
            assert "/etc/config.json does not exist" in refused.text
            assert client.generate("Hello", max_tokens=2, ignore_eos=True).num_output_tokens == 2
            assert engine_pids(explicit.pid) == before
            if number == 0:
                # The crash came within a second, or with the next load.
                time.sleep(1.5)
    finally:
        config.write_text(good, encoding="utf-8")
    touch_model(explicit)
    assert change_model(explicit, "load").is_success
    assert client.generate("Hello", max_tokens=2, ignore_eos=True).num_output_tokens == 2


def touch_model(server: TritonServer) -> None:
    """Change the model's files, which makes Triton load it anew."""
    config = server.folder / "models" / "dflash" / "config.pbtxt"
    config.write_text(config.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    (config.parent / "1" / "model.py").touch()


def test_what_runs_finishes_while_its_model_is_unloaded_and_nothing_new_is_taken(explicit, client):
    stream = client.stream("Tell me a story.", temperature=0, max_tokens=400, ignore_eos=True)
    deltas = [next(stream)]
    unloading = threading.Thread(target=change_model, args=(explicit, "unload"))
    unloading.start()
    eventually(lambda: not ready(explicit), "not ready")
    with pytest.raises(ClientError):
        client.generate("And now?", max_tokens=1)
    deltas += stream
    unloading.join(30)
    assert deltas[-1].finish_reason == "length"
    assert sum(delta.num_output_tokens for delta in deltas) == 400
    eventually(lambda: engine_pids(explicit.pid) == [], "the engine ends")


def test_unloading_in_the_middle_of_a_restart_does_not_hang(explicit, client):
    client.generate("Hello", max_tokens=1)
    os.kill(engine_pids(explicit.pid)[0], signal.SIGKILL)
    eventually(lambda: value(explicit, "dflash:engine_ready") == 0, "the death is noticed")
    start = time.monotonic()
    unload(explicit)
    assert time.monotonic() - start < 10


@pytest.mark.nightly
def test_unloading_in_the_middle_of_loading_does_not_hang(explicit):
    if ready(explicit):
        unload(explicit)
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(change_model, explicit, "load")
        eventually(lambda: engine_pids(explicit.pid) != [], "it loads")
        change_model(explicit, "unload")
        loading.result(30)
    unload(explicit)


@pytest.mark.nightly
@pytest.mark.slow
def test_a_model_that_is_unloaded_and_loaded_over_and_over_leaks_nothing(explicit, held_at_first, client):
    """Here, and in the tests before."""
    held = [held_at_first]
    for _ in range(RELOADS):
        unload(explicit)
        assert change_model(explicit, "load").is_success
        assert client.generate("Hello", max_tokens=2, ignore_eos=True).num_output_tokens == 2
        held.append(held_by(explicit))
    first, last = held[0], held[-1]
    assert (last["processes"], last["segments"]) == (first["processes"], first["segments"])
    # Connections of these very requests may still be closing.
    assert last["descriptors"] <= first["descriptors"] + 2, held
    assert last["rss"] <= first["rss"] * (1 + MAX_GROWTH), held


@pytest.mark.nightly
def test_two_instances_share_the_requests_and_their_counters_but_no_gauge():
    number, tokens = 16, 60 if SCALE >= 4 else 24
    with new_server(instances=2) as server, DFlashClient(server.http_url, "http", timeout_s=60) as client:
        assert len(engine_pids(server.pid)) == 2
        with ThreadPoolExecutor(number) as pool:

            def ask(n: int) -> int:
                return client.generate(f"Count from {n}.", max_tokens=tokens, ignore_eos=True).num_output_tokens

            assert list(pool.map(ask, range(number))) == [tokens] * number
        name = "dflash:generation_tokens_total"
        eventually(lambda: value(server, name) == number * tokens, "the sum")
        assert MetricsPage.read(server.metrics_url).by(name, "engine") == {}

        def gauges() -> list[float]:
            return sorted(MetricsPage.read(server.metrics_url).by("dflash:engine_ready", "engine").values())

        assert gauges() == [1, 1]
        # One of the two dies; the other goes on, and so does the server.
        os.kill(engine_pids(server.pid)[0], signal.SIGKILL)
        eventually(lambda: gauges() == [0, 1], "one is not ready")
        eventually(lambda: gauges() == [1, 1], "both are ready")
