"""What the checks see of a server: its metrics page, and its processes by role."""

from __future__ import annotations

import subprocess
import sys
import time

from load_tests.server_state import MetricsPage, cpu_seconds, processes_by_role, resident_bytes
from tests.support.waiting import eventually

RUNNING, STEPS, REASONS = "dflash:num_requests_running", "dflash:step_seconds_count", "dflash:request_success_total"
PAGE = f"""# HELP {RUNNING} Requests that run
# TYPE {RUNNING} gauge
{RUNNING}{{engine="dflash_0",model="dflash"}} 3
{RUNNING}{{engine="dflash_1",model="dflash"}} 4
{RUNNING}{{engine="dflash_1",model="other"}} 9
# HELP {STEPS} Number of observations
# TYPE {STEPS} counter
{STEPS}{{model="dflash",phase="draft"}} 8
{STEPS}{{model="dflash",phase="verify"}} 9
# TYPE {REASONS} counter
{REASONS}{{finished_reason="stop",model="dflash"}} 1
{REASONS}{{finished_reason="length",model="dflash"}} 2
# TYPE nv_gpu_memory_total_bytes gauge
nv_gpu_memory_total_bytes 1e9
"""


def test_a_metric_is_summed_over_the_labels_that_are_not_given() -> None:
    page = MetricsPage(PAGE)
    assert page.value(RUNNING) == 7
    assert page.value(RUNNING, engine="dflash_1") == 4
    assert page.value("dflash:never_counted_total") == 0
    assert MetricsPage(PAGE, "other").value(RUNNING) == 9


def test_a_counter_has_the_name_that_is_on_the_page() -> None:
    assert MetricsPage(PAGE).value(STEPS, phase="verify") == 9
    assert MetricsPage(PAGE).by(REASONS, "finished_reason") == {"stop": 1, "length": 2}


def test_shares_of_several_engines_are_not_summed() -> None:
    usage = "dflash:kv_cache_usage_perc"
    lines = [f'{usage}{{engine="dflash_{index}",model="dflash"}} {value}' for index, value in enumerate((0.5, 0.75))]
    page = MetricsPage("\n".join([f"# TYPE {usage} gauge", *lines]))
    assert page.totals() == {usage: 0.625}
    assert page.value(usage) == 0.625
    assert page.value(usage, engine="dflash_1") == 0.75


def test_totals_leave_out_other_models() -> None:
    totals = MetricsPage(PAGE).totals()
    assert (totals[RUNNING], totals[REASONS]) == (7, 3)
    assert "nv_gpu_memory_total_bytes" not in totals


def test_processes_are_told_apart_and_those_that_end_count_nothing() -> None:
    wait = "import sys; sys.stdin.read()"
    code = (
        "import subprocess, sys, time\nwhile time.process_time() < 0.1: pass\n"
        f"subprocess.run([sys.executable, '-c', '{wait}', 'triton_' + 'python_backend_stub'])"
    )
    with subprocess.Popen([sys.executable, "-c", code, "tritonserver"], stdin=subprocess.PIPE) as process:
        deadline = time.monotonic() + 30
        while "stub" not in (processes := processes_by_role(process.pid)):
            assert time.monotonic() < deadline, processes
        assert [one.pid for one in processes["server"]] == [process.pid]
        # Just after its start a process has next to nothing.
        eventually(lambda: resident_bytes(processes["stub"]) > 1 << 20, "memory of the stub")
        assert cpu_seconds(processes["server"]) > 0
    assert resident_bytes(processes["stub"]) == cpu_seconds(processes["server"]) == 0


def test_a_process_of_another_kind_has_no_role() -> None:
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as process:
        assert processes_by_role(process.pid) == {}
