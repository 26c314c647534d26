"""What the compiler says of attention's kernels, and that it is what the tilings are chosen for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton.backends.nvidia", reason="this build of Triton cannot compile for NVIDIA GPUs")
from benchmarks.gpu.compile_table import overlap_of_loops
from tests.support.scale import SCALE

ROOT = Path(__file__).resolve().parents[2]
TURNS = """
  %a = scf.for %i = %c0 to %n step %c64 {
    %s = ttng.warp_group_dot %q, %k {isAsync = true}
    %t = ttng.warp_group_dot_wait %s {pendings = 0 : i32}
    %w = math.exp2 %t
    %b = scf.for %j = %c0 to %n step %c64 {
      %x = arith.addf %y, %y
    }
    %o = ttng.warp_group_dot %w, %v {isAsync = true}
    %e = math.exp2 %t
  }
  %r = ttng.warp_group_dot_wait %a {pendings = 0 : i32}
"""


def test_exponentials_beside_a_product_are_told_from_those_that_wait_for_it() -> None:
    assert overlap_of_loops(TURNS) == ((1, 1),)
    assert overlap_of_loops(TURNS.replace("    %e = math.exp2 %t\n", "")) == ((1, 0),)
    assert overlap_of_loops(TURNS.replace("pendings = 0", "pendings = 1")) == ((0, 1),)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("arch", [89, 90] if SCALE >= 4 else [90])  # each takes twenty seconds to compile
def test_no_kernel_spills_and_products_of_a_prompt_run_beside_its_softmax(arch: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.gpu.compile_table", "--arch", str(arch)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    # In FP8 the tiles of KV take less.
    shared = [shared_by_kernel(part, arch) for part in done.stdout.partition("| GPU")[2].split("With KV in FP8:")]
    assert len(shared[0]) == 8
    assert all(shared[1][kernel] < kib for kernel, kib in shared[0].items())
    if arch == 90:
        # A Hopper has one loop for bfloat16 but of wide heads (`Tiling.loop`): the rest has no overlapped one.
        loops = [line.split(" | ")[1:] for line in done.stdout.splitlines() if line.endswith(" | 1, 0 |")]
        assert loops == [["-", "1, 0 |"]] * 3 + [["1, 2", "1, 0 |"]]


def shared_by_kernel(tables: str, arch: int) -> dict[tuple[str, str], float]:
    """KiB of shared memory by heads and kind of rows, of the rows of attention among these."""
    rows = [line.split(" | ") for line in tables.splitlines() if line.startswith(f"| sm_{arch} | ")]
    return {(row[1], row[2]): float(row[-2]) for row in rows if " of " in row[1]}
