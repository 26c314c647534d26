"""A real Triton server streams from the demo pair with the engine on the GPU."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("tritonclient.grpc", reason="the client needs the package tritonclient")
pytest.importorskip("zmq", reason="the engine process needs the package pyzmq")

from dflash_cli.launcher.server import LauncherError, TritonServer
from dflash_cli.launcher.triton_install import find_triton
from dflash_client import DFlashClient

PROMPT = "Sam fills 4 bags with 6 marbles each and gives away 7 marbles. How many marbles does Sam keep?"
SETTINGS = {"device": "cuda", "max_num_seqs": "8", "max_model_len": "1024", "kv_cache_gb": "0.5"}


@pytest.mark.server
def test_a_server_streams_from_the_gpu() -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("DFLASH_")}
    try:
        find_triton(environ)
    except LauncherError as error:
        pytest.skip(f"no Triton server here: {error}")
    ports = {"http_port": 0, "grpc_port": 0, "metrics_port": 0}
    with (
        TritonServer(SETTINGS, environ=environ, host="127.0.0.1", ready_timeout_s=300.0, **ports) as server,
        DFlashClient(server.grpc_url, "grpc", timeout_s=120) as client,
    ):
        whole = client.generate(PROMPT, max_tokens=64, temperature=0).text
        parts = [delta.text for delta in client.stream(PROMPT, max_tokens=64, temperature=0)]
        assert "cuda" in server.log_tail(400)
    assert "".join(parts) == whole
    assert len(parts) > 1
    assert whole.strip()
