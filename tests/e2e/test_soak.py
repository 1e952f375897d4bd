"""Two hundred steps while something dies every few seconds: the run that comes out is the one that nobody disturbed.

python -m pytest -q -m full tests/e2e/test_soak.py
"""

import os
import random
import signal
import statistics
import threading
import time
from pathlib import Path

import pytest

from tests.e2e import world
from tests.e2e.test_server_dies import kill_server
from tests.e2e.tiny_servers import below

STEPS = 200
SEED = 6
OPTIONS = [f"run.max_steps={STEPS}", "run.save_steps=5", "run.save_total_limit=2", "rollout.max_restarts=1000"]
FAULTS = ["server killed", "server stopped for two seconds", "trainer killed", "trainer told to stop"]


def server_processes(trainer):
    (supervisor,) = [pid for pid in world.family(trainer.pid) if "supervisor.py" in Path(f"/proc/{pid}/cmdline").read_text()]
    return below(supervisor)


def stop_server_for_a_while(trainer):
    processes = server_processes(trainer)
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in processes:
            if world.alive(pid):
                os.kill(pid, number)
        time.sleep(2)


def strike(fault, trainer):
    """Do it; False when there is no server at the moment that could be struck."""
    try:
        if fault == "server killed":
            kill_server(trainer.pid)
        elif fault == "server stopped for two seconds":
            stop_server_for_a_while(trainer)
        else:
            os.kill(trainer.pid, signal.SIGKILL if fault == "trainer killed" else signal.SIGTERM)
    except (ValueError, OSError):
        return False
    return True


def megabytes(pids):
    """Memory of the processes in all, what they share counted once (PSS)."""
    total = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1024


def wait_for_a_step(output, trainer, what):
    done = world.steps_done(output)
    world.wait_for(lambda: world.steps_done(output) != done or not world.alive(trainer.pid), what, seconds=180)


def one_attempt(output, trainer, rng, listed):
    """Strike the run until a fault ends it, or it is done; then nothing of it may be left."""
    wait_for_a_step(output, trainer, "a step after a start")
    family, fatal = [], False
    while world.alive(trainer.pid) and not fatal:
        time.sleep(rng.uniform(2, 5))
        fault = rng.choice(FAULTS)
        family = world.family(trainer.pid) if world.alive(trainer.pid) else family
        files = world.shared_memory(family)
        if world.alive(trainer.pid) and strike(fault, trainer):
            listed.append((world.steps_done(output), fault))
            fatal = fault.startswith("trainer")
            if not fatal:
                wait_for_a_step(output, trainer, f"a step after {fault}")
    run = trainer.wait(seconds=180)
    world.wait_for(lambda: not any(map(world.alive, family)), "end of all processes", seconds=20)
    world.wait_for(lambda: not any(file.exists() for file in files), "end of all files in shared memory", seconds=10)
    return run


def watch(output, trainer, ended, memory):
    while not ended.wait(1.0):
        memory.append((world.steps_done(output), megabytes(world.family(trainer.pid))))


def struck_run(output, rng):
    """The run to its end through faults drawn by `rng`; the faults with the step that each met, and its memory every second."""
    listed, memory, resume = [], [], []
    while True:
        with world.running(output, *OPTIONS, *resume, launched=True) as trainer:
            ended = threading.Event()
            watcher = threading.Thread(target=watch, args=(output, trainer, ended, memory))
            watcher.start()
            try:
                run = one_attempt(output, trainer, rng, listed)
            finally:
                ended.set()
                watcher.join()
        if run.code == 0:
            return run, listed, memory
        assert run.code in (-signal.SIGKILL, 128 + signal.SIGTERM), f"{listed}\n{run.out}\n{run.err}"
        resume = ["--resume"]


@pytest.mark.full
def test_a_run_that_is_struck_every_few_seconds_is_the_run_that_nobody_disturbed(tmp_path):
    plain = world.train(tmp_path / "plain", *OPTIONS, launched=True)
    assert plain.code == 0, plain.err
    run, listed, memory = struck_run(tmp_path / "struck", random.Random(SEED))
    print("\n".join(f"step {step}: {fault}" for step, fault in listed))
    assert {fault for _, fault in listed} == set(FAULTS)
    assert [line["step"] for line in run.metrics] == list(range(1, STEPS + 1))
    assert [(row["step"], row["completion"]) for row in run.completions] == [(row["step"], row["completion"]) for row in plain.completions]
    early, late = ([mb for step, mb in memory if low <= step < low + STEPS / 4] for low in (STEPS / 4, STEPS * 3 / 4))
    assert statistics.median(late) < 1.1 * statistics.median(early)
