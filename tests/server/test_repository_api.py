"""Models are loaded, unloaded and replaced while the server runs; several models and instances share a server."""

from __future__ import annotations

import glob
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest

from checks.server_state import engine_pids
from dflash_cli.launcher.processes import family
from dflash_cli.launcher.server import TritonServer
from dflash_client import DFlashClient
from dflash_client.errors import ClientError
from tests.scale import scaled
from tests.server.conftest import eventually, new_server

# Each takes some six seconds of CPU time, most of them to import torch; TEST_SCALE=2 has ten.
RELOADS = scaled(5, at_least=3)
BAD_LOADS = 2
# Before the first figures are taken, allocators and caches of the server have grown to what they keep.
WARM_UP = 2
# Resident memory of the server's own process may differ by so much from one load to a much later one.
MAX_GROWTH = 0.05


@pytest.fixture(scope="module")
def explicit() -> Iterator[TritonServer]:
    with new_server(explicit=True) as server:
        yield server


@pytest.fixture
def client(explicit: TritonServer) -> Iterator[DFlashClient]:
    with DFlashClient(explicit.http_url, "http", timeout_s=60) as client:
        if not ready(explicit):
            change(explicit, "load")
        yield client


def change(server: TritonServer, action: str, model: str = "dflash") -> httpx.Response:
    """`load` or `unload` through the repository API; it returns when Triton has done it."""
    url = f"http://{server.http_url}/v2/repository/models/{model}/{action}"
    return httpx.post(url, json={}, timeout=60, trust_env=False)


def ready(server: TritonServer, model: str = "dflash") -> bool:
    return httpx.get(f"http://{server.http_url}/v2/models/{model}/ready", timeout=10, trust_env=False).is_success


def samples(server: TritonServer, name: str) -> list[str]:
    """The lines of a metric."""
    page = httpx.get(f"http://{server.metrics_url}/metrics", timeout=10, trust_env=False).text
    return [line for line in page.splitlines() if line.startswith(name + "{")]


def held_by(server: TritonServer) -> dict[str, int]:
    """What the server holds on to: processes, descriptors and shared memory by number, resident memory in KiB."""
    process = psutil.Process(server.pid)
    return {
        "processes": len(family(server.pid)),
        "descriptors": process.num_fds(),
        "segments": len(glob.glob(server._running_files().segments_pattern)),
        "rss": process.memory_info().rss >> 10,
    }


@pytest.mark.slow
def test_a_model_that_is_unloaded_and_loaded_over_and_over_leaks_nothing(explicit, client):
    held = []
    for _ in range(WARM_UP + RELOADS):
        assert change(explicit, "unload").is_success
        eventually(lambda: engine_pids(explicit.pid) == [], "the engine ends")
        assert change(explicit, "load").is_success
        assert client.generate("Hello", max_tokens=2, ignore_eos=True).num_output_tokens == 2
        held.append(held_by(explicit))
    first, last = held[WARM_UP - 1], held[-1]
    assert (last["processes"], last["segments"]) == (first["processes"], first["segments"])
    # Connections of these very requests may still be closing.
    assert last["descriptors"] <= first["descriptors"] + 2, held
    assert last["rss"] <= first["rss"] * (1 + MAX_GROWTH), held


def test_what_runs_finishes_while_its_model_is_unloaded_and_nothing_new_is_taken(explicit, client):
    stream = client.stream("Tell me a story.", temperature=0, max_tokens=900, ignore_eos=True)
    deltas = [next(stream)]
    unloading = threading.Thread(target=change, args=(explicit, "unload"))
    unloading.start()
    eventually(lambda: not ready(explicit), "not ready")
    with pytest.raises(ClientError):
        client.generate("And now?", max_tokens=1)
    deltas += stream
    unloading.join(30)
    assert deltas[-1].finish_reason == "length"
    assert sum(delta.num_output_tokens for delta in deltas) == 900
    eventually(lambda: engine_pids(explicit.pid) == [], "the engine ends")


def test_unloading_in_the_middle_of_a_restart_does_not_hang(explicit, client):
    client.generate("Hello", max_tokens=1)
    os.kill(engine_pids(explicit.pid)[0], signal.SIGKILL)
    eventually(lambda: samples(explicit, "dflash:engine_ready")[0].endswith(" 0"), "the death is noticed")
    start = time.monotonic()
    assert change(explicit, "unload").is_success
    eventually(lambda: engine_pids(explicit.pid) == [], "the engine that was being started ends")
    assert time.monotonic() - start < 10


def test_unloading_in_the_middle_of_loading_does_not_hang(explicit, client):
    change(explicit, "unload")
    eventually(lambda: engine_pids(explicit.pid) == [], "the engine ends")
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(change, explicit, "load")
        eventually(lambda: engine_pids(explicit.pid) != [], "it loads")
        change(explicit, "unload")
        loading.result(30)
    change(explicit, "unload")
    eventually(lambda: engine_pids(explicit.pid) == [], "the engine ends")


def test_a_model_that_is_loaded_again_while_it_serves_is_replaced_and_its_counters_go_on(explicit, client):
    client.generate("Hello", max_tokens=3, ignore_eos=True)
    name = "dflash:generation_tokens_total"
    before = engine_pids(explicit.pid)
    eventually(lambda: len(samples(explicit, name)) == 1, "it is counted")
    touch_model(explicit)
    assert change(explicit, "load").is_success
    eventually(lambda: len(engine_pids(explicit.pid)) == 1 and engine_pids(explicit.pid) != before, "it is replaced")
    counted = float(samples(explicit, name)[0].rpartition(" ")[2])
    client.generate("Hello", max_tokens=5, ignore_eos=True)
    eventually(lambda: float(samples(explicit, name)[0].rpartition(" ")[2]) == counted + 5, "it is counted")
    eventually(lambda: samples(explicit, "dflash:engine_ready")[0].endswith(" 1"), "the gauge is the new engine's")


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
        for _ in range(BAD_LOADS):
            config.write_text(bad, encoding="utf-8")
            refused = change(explicit, "load")
            assert refused.status_code == 400
            assert "/etc/config.json does not exist" in refused.text
            assert client.generate("Hello", max_tokens=2, ignore_eos=True).num_output_tokens == 2
            assert engine_pids(explicit.pid) == before
            # The crash came within a second, or with the next load.
            time.sleep(1.5)
    finally:
        config.write_text(good, encoding="utf-8")
    touch_model(explicit)
    assert change(explicit, "load").is_success
    assert client.generate("Hello", max_tokens=2, ignore_eos=True).num_output_tokens == 2


def touch_model(server: TritonServer) -> None:
    """Change the model's files, which makes Triton load it anew."""
    config = server.folder / "models" / "dflash" / "config.pbtxt"
    config.write_text(config.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    (config.parent / "1" / "model.py").touch()


def test_two_models_of_one_server_each_have_their_settings_and_their_metrics():
    with new_server(more_models={"plain": {"num_speculative_tokens": "0"}}) as server:
        with DFlashClient(server.http_url, "http", timeout_s=60) as drafted:
            one = drafted.generate("What is 5 + 6?", temperature=0, max_tokens=24)
        with DFlashClient(server.http_url, "http", model="plain", timeout_s=60) as plain:
            other = plain.generate("What is 5 + 6?", temperature=0, max_tokens=24)
        assert one.text == other.text
        name = "dflash:request_success_total"
        eventually(lambda: len(samples(server, name)) == 2, "both are counted")
        drafts = dict(line.rsplit(" ", 1) for line in samples(server, "dflash:spec_decode_num_drafts_total"))
        assert {key.partition('model="')[2].partition('"')[0]: float(value) > 0 for key, value in drafts.items()} == {
            "dflash": True,
            "plain": False,
        }


def test_two_instances_share_the_requests_and_their_counters_but_no_gauge():
    number, tokens = 16, 60
    with new_server(instances=2) as server, DFlashClient(server.http_url, "http", timeout_s=60) as client:
        assert len(engine_pids(server.pid)) == 2
        with ThreadPoolExecutor(number) as pool:

            def ask(n: int) -> int:
                return client.generate(f"Count from {n}.", max_tokens=tokens, ignore_eos=True).num_output_tokens

            assert list(pool.map(ask, range(number))) == [tokens] * number
        name = "dflash:generation_tokens_total"
        eventually(
            lambda: [float(line.rpartition(" ")[2]) for line in samples(server, name)] == [number * tokens], "the sum"
        )
        assert sorted(line.rpartition(" ")[2] for line in samples(server, "dflash:engine_ready")) == ["1", "1"]
        # One of the two dies; the other goes on, and so does the server.
        os.kill(engine_pids(server.pid)[0], signal.SIGKILL)
        eventually(lambda: sorted(ready_gauges(server)) == [0, 1], "one is not ready")
        eventually(lambda: sorted(ready_gauges(server)) == [1, 1], "both are ready")


def ready_gauges(server: TritonServer) -> list[float]:
    return [float(line.rpartition(" ")[2]) for line in samples(server, "dflash:engine_ready")]
