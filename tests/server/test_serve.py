"""The model under what keeps a server running: its sign of life, and an end with processes that no signal reaches."""

from __future__ import annotations

import os
import signal
import time

import pytest

from dflash_cli.launcher.processes import family, gone, send
from dflash_client import DFlashClient
from dflash_client.errors import ClientError
from load_tests.server_state import engine_pids
from tests.cli.test_launcher import leftovers
from tests.cli.test_restarts import kept
from tests.server.conftest import new_server


def test_a_stub_that_is_stopped_is_replaced_with_its_engine_and_its_streams_end() -> None:
    with kept(server=new_server(exit_timeout_s=1)) as one:
        before = family(one.server.pid)
        with DFlashClient(one.server.grpc_url, timeout_s=60) as client:
            stream = client.stream("Tell me a story.", max_tokens=900, ignore_eos=True)
            next(stream)
            os.kill(one.members()["stub"].pid, signal.SIGSTOP)
            with pytest.raises(ClientError) as caught:
                list(stream)
            assert caught.value.status != "DEADLINE_EXCEEDED"
        one.wait_until_ready_again()
        assert gone(before, 0)
        with DFlashClient(one.server.grpc_url, timeout_s=60) as client:
            assert client.generate("Hello", max_tokens=2, ignore_eos=True).num_output_tokens == 2


@pytest.mark.parametrize("process", ["engine", "stub", "tritonserver"])
def test_a_stop_ends_what_no_signal_but_sigkill_reaches(process: str) -> None:
    before = leftovers()
    with new_server(exit_timeout_s=1) as server:
        members = family(server.pid)
        pids = {"engine": set(engine_pids(server.pid)), "tritonserver": {server.pid}}
        pids["stub"] = {p.pid for p in members} - pids["engine"] - pids["tritonserver"]
        send({p for p in members if p.pid in pids[process]}, signal.SIGSTOP)
        began = time.monotonic()
    assert gone(members, 0)
    assert time.monotonic() - began < 20
    assert leftovers() == before
