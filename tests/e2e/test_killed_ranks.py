"""One of two ranks is killed by SIGKILL: the other ends within seconds and the launcher names the killed rank. The
resumed run is bit-identical to a run without kills."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.e2e import world

STEPS = 6


def process_of_rank(launcher_pid, rank):
    """The trainer process of this rank; its children have the same environment and a later process id."""
    found = [
        pid for pid in world.family(launcher_pid) if f"\0RANK={rank}\0" in Path(f"/proc/{pid}/environ").read_text()
    ]
    return found[0]


def asked(run):
    return [(row["step"], row["prompt_id"], row["completion"], row["advantage"]) for row in run.completions]


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "rank", "launched"), [("parallel.tp=2", 1, False), ("parallel.tp=1", 0, True)], ids=["tp", "dp"]
)
def test_a_rank_that_is_killed_takes_the_others_along_and_the_run_goes_on_bit_by_bit(layout, rank, launched, tmp_path):
    options = [f"run.max_steps={STEPS}", "run.save_steps=1", "run.save_total_limit=1", layout]
    plain = world.finish(world.start(tmp_path / "plain", *options, NPROC="2"), tmp_path / "plain")
    assert plain.code == 0, plain.err
    output = tmp_path / "killed"
    process = world.start(output, *options, launched=launched, NPROC="2")
    world.wait_for(lambda: world.steps_done(output) >= 2 or process.poll() is not None, "second step")
    family = world.family(process.pid)
    files = world.shared_memory(family)
    os.kill(process_of_rank(process.pid, rank), signal.SIGKILL)
    began = time.monotonic()
    killed = world.finish(process, output)
    assert time.monotonic() - began < 20 and killed.code == 1, killed.err
    assert f"rank {rank} was killed by SIGKILL" in killed.err and 2 <= len(killed.metrics) < STEPS
    world.wait_for(lambda: not any(map(world.alive, family)), "end of all processes", seconds=15)
    world.wait_for(lambda: not any(file.exists() for file in files), "end of all files in shared memory", seconds=5)
    run = world.finish(world.start(output, *options, "--resume", NPROC="2"), output)
    assert run.code == 0, run.err
    assert [line["step"] for line in run.metrics] == list(range(1, STEPS + 1)) and asked(run) == asked(plain)
    expected, found = world.plain_tensors(plain.newest), world.plain_tensors(run.newest)
    assert (
        len(expected) > 30
        and expected.keys() == found.keys()
        and all(expected[name].equal(tensor) for name, tensor in found.items())
    )
