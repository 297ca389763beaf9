"""No operation of a step uses memory out of order with those of other streams, or after it was freed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megalite.extras.estimate.order import COMPUTE, HOST, Order

ROOT = Path(__file__).resolve().parents[4]
PROGRAM = """
from megalite.extras.estimate.guard import install_guard
install_guard()
from tests.unit.extras.estimate.fake_races import main
main()
"""
# Layout whose memory takes another way through streams (a schedule alone has none): how many streams besides the host's
# it has at least.
CASES = {
    "zero0-gpt2": 7,
    "zero2-step-gpt2": 2,
    "zero2-zb-v": 7,
    "zero3-zb-h1-llama": 7,
    "zero3-backward-llama": 7,
    "zero3-keep-step-gpt2": 2,
    "zero3-groups-recompute": 5,
    "tp2-pp2-vp2-dp2-zero1-gpt2": 2,
    "pp2-zb-v-gpt2": 2,
    "no-sp-zb-h1-gpt2": 2,
    "no-overlap-llama": 7,
    "one-bucket-gpt2": 2,
    "bf16-reduce": 7,
    "int8-gpt2": 2,
    "recompute-selective-gpt2": 2,
    "loss-chunk-gpt2": 2,
    "cp2-gather-zb-v": 2,
    "cp2-ring-zero3": 2,
    "cp4-a2a-zero2": 2,
    "cp8-a2a+ring": 2,
    "ep2-cp2-zero2": 2,
    "ep4-whole-zero3": 2,
    "experts-zero3-zb-v": 7,
    "mtp-zero3": 2,
    "offload-optimizer": 9,
    "offload-params": 9,
    "offload-activations-zero3": 9,
    "interrupted": 4,
}
# Mutant, and a fault that it has.
MUTANTS = {
    "weights are not waited for": "reads what all_gather on dp writes",
    "a reduction is not waited for": "resize_ frees what reduce_scatter on dp still reads",
    "the chain does not wait": "reads what all_gather on dp writes",
    "the host does not wait for copies": "on host reads what copy_ on stream",
    "fetched activations are not waited for": "on compute reads what copy_ on stream",
    "an upload does not wait for compute": "new memory before compute is done with it",
    "what is under way is forgotten": "resize_ frees what reduce_scatter on dp still writes",
}


Check = Callable[[str, bool], tuple[dict[str, int], int, list[str]]]


@pytest.fixture(scope="module")
def check() -> Iterator[Check]:
    """Faults, operations and streams of a case or a mutant, on its last rank or its first, from one process for all."""
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler, which a CPU build of torch requires to imitate a GPU")
    command, pipe = [sys.executable, "-c", PROGRAM], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1, cwd=ROOT) as process:

        def ask(name: str, last: bool) -> Any:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps([name, last]) + "\n")
            return json.loads(process.stdout.readline())

        yield ask


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_memory_is_used_in_order(check: Check, name: str) -> None:
    faults, operations, streams = check(name, [*CASES].index(name) % 2 == 0)
    assert faults == {}
    assert operations > 400
    assert len(set(streams) - {HOST, "upload"}) >= CASES[name]


@pytest.mark.full
@pytest.mark.parametrize("name", MUTANTS)
def test_what_does_not_wait_is_found(check: Check, name: str) -> None:
    faults, *_ = check(name, [*MUTANTS].index(name) % 2 == 1)
    assert any(MUTANTS[name] in fault for fault in faults), faults


COMMAND = """
import sys
from megalite.extras.estimate.guard import install_guard
install_guard()
from megalite.extras.estimate import command
from megalite.extras.tool import run_tool
from megalite.core.optim.weight_store import WeightStore
WeightStore.wait = lambda store: None
# As the tool ends: without waiting for threads of the autograd engine, which may abort the process.
run_tool(lambda: command.main(sys.argv[1:]))
"""
RUN = (
    "--num-layers 2 --hidden-size 64 --num-heads 4 --vocab-size 128 --seq-len 32 --global-batch-size 4 --precision bf16"
)


@pytest.mark.full
def test_the_command_lists_faults_and_ends_with_1(check: Check) -> None:
    """`check` for the compiler that it requires."""
    flags = f"--streams --rank 1 --world 2 --zero 3 --zero-whole-below 0 {RUN}".split()
    done = subprocess.run([sys.executable, "-c", COMMAND, *flags], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1, done.stderr
    first, *faults = done.stdout.splitlines()
    assert first.endswith(" streams: out of order:")
    assert any("reads what all_gather on dp writes" in fault for fault in faults)


def test_order_by_hand() -> None:
    order = Order()
    order.allocate(1, COMPUTE)
    order.launch(COMPUTE, "fill", [], [(1, 0, 8)])
    order.launch("dp", "sum", [(1, 4, 8)], [])
    assert order.faults == {"sum on dp reads what fill on compute writes": 1}
    order.wait("dp", order.clock(COMPUTE))
    order.launch("dp", "sum", [(1, 4, 8)], [])
    # Another part of the memory, two reads, and what record_stream protects.
    order.launch(COMPUTE, "fill", [], [(1, 0, 4)])
    order.launch(COMPUTE, "read", [(1, 4, 8)], [])
    assert order.faults.total() == 1
    order.free(1, "del")
    assert order.faults.total() == 3
    order.allocate(1, COMPUTE)
    order.launch("dp", "sum", [(1, 0, 8)], [])
    assert order.faults["sum on dp reads new memory before compute is done with it"] == 1
    order.record(1, "dp")
    order.free(1, "del")
    assert order.faults.total() == 4
