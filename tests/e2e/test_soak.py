"""Two hundred steps with a fault every few seconds: the run ends bit-identical to a run without kills.

python -m pytest -q -s -m full tests/e2e/test_soak.py
"""

import contextlib
import os
import random
import signal
import statistics
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from megagrpo.engine.client import VllmEngine
from megagrpo.engine.servers.launcher import Launcher
from megagrpo.engine.servers.restarts import Restarter
from megagrpo.sync.trainer_side.sync import WeightSync
from tests.e2e import world
from tests.e2e.test_server_dies import kill_server
from tests.e2e.tiny_servers import below

STEPS = 200
SEED = 6


def options(steps):
    return [f"run.max_steps={steps}", "run.save_steps=5", "run.save_total_limit=2", "rollout.max_restarts=1000"]


@dataclass
class Struck:
    """A run with faults: its folder `home` with its temporary files, its current phase, the faults so far, and the
    resources it has used."""

    home: Path
    rng: random.Random
    listed: list[tuple[int, str, str]] = field(default_factory=list)  # step, fault, phase of the fault
    memory: list[tuple[int, float]] = field(default_factory=list)  # step, MiB; every second
    processes: set[tuple[int, str]] = field(default_factory=set)
    files: set[Path] = field(default_factory=set)
    sockets: set[str] = field(default_factory=set)

    def __post_init__(self):
        (self.home / "tmp").mkdir(parents=True)

    def tell(self):
        """Called in the trainer: records its phase and its server's state, and gives it a folder for temporary
        files."""
        os.environ["TMPDIR"], tempfile.tempdir = str(self.home / "tmp"), None
        for owner, method, during, after in [
            (VllmEngine, "generate", "generation", "other"),
            (WeightSync, "push", "sync", "other"),
            (Launcher, "_launch", "start-up", "start-up"),
            (Launcher, "wait", "start-up", "up"),
            (Restarter, "_fill", "start-up", "up"),
        ]:
            told = self.home / ("trainer" if after == "other" else "server")
            setattr(owner, method, telling(getattr(owner, method), told, during, after))

    @property
    def phase(self):
        """The phase: start-up (also of a server that the trainer may wait for), generation, sync or other."""
        trainer, server = ((self.home / name).read_text() for name in ("trainer", "server"))
        return "start-up" if server == "start-up" else trainer or "other"

    def look(self, trainer):
        """Record the run's current processes, files and ports."""
        family = world.family(trainer.pid)
        self.memory.append((world.steps_done(self.home), megabytes(family)))
        self.processes |= {(pid, born(pid)) for pid in family if born(pid)}
        self.files |= world.shared_memory(family)
        self.sockets |= listening(family)

    def left(self):
        """List the recorded processes, files and ports that still exist."""
        processes = [pid for pid, at in [*self.processes] if born(pid) == at]
        files = [file for file in [*self.files] if file.exists()] + [*(self.home / "tmp").iterdir()]
        return processes + files + [*(self.sockets & listeners())]


def telling(original, told, during, after):
    def wrapped(*args, **kwargs):
        told.write_text(during)
        try:
            return original(*args, **kwargs)
        finally:
            told.write_text(after)

    return wrapped


def born(pid):
    """The start time of a living process, because ids are reused. Empty when the process has ended."""
    with contextlib.suppress(OSError):
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return rest[18] if state != "Z" else ""
    return ""


def listeners():
    """Inodes of all listening TCP sockets on this machine."""
    rows = [
        line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    return {row[9] for row in rows if row[3] == "0A"}


def listening(pids):
    """Inodes of the processes' sockets."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    found.add(os.readlink(descriptor).removeprefix("socket:[").removesuffix("]"))
    return found & listeners()


def megabytes(pids):
    """Total memory of the processes; shared memory counts once (PSS)."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1024


def kill_the_server(struck, trainer):
    phase = struck.phase
    kill_server(trainer.pid)
    return phase


def kill_the_server_in(phase):
    def kill(struck, trainer):
        processes = server_processes(trainer)
        world.wait_for(lambda: struck.phase == phase or not world.alive(trainer.pid), phase, seconds=60)
        for pid in processes:
            os.kill(pid, signal.SIGKILL)
        return phase

    return kill


def kill_the_server_twice(struck, trainer):
    """The second kill hits the server during its restart."""
    kill_server(trainer.pid)
    world.wait_for(lambda: struck.phase == "start-up" or not world.alive(trainer.pid), "start-up", seconds=60)
    time.sleep(struck.rng.uniform(0, 3))
    return kill_the_server(struck, trainer)


def stop_the_server_for_a_while(struck, trainer):
    phase, processes = struck.phase, server_processes(trainer)
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in filter(world.alive, processes):
            os.kill(pid, number)
        time.sleep(2)
    return phase


def server_processes(trainer):
    (supervisor,) = [
        pid for pid in world.family(trainer.pid) if "supervisor.py" in Path(f"/proc/{pid}/cmdline").read_text()
    ]
    return below(supervisor)


def end_the_trainer(number):
    def end(struck, trainer):
        phase = struck.phase
        os.kill(trainer.pid, number)
        return phase

    return end


AT_THE_START = "server killed at the start of the run"
FAULTS = {
    "server killed": kill_the_server,
    "server killed in a generation": kill_the_server_in("generation"),
    "server killed in a sync": kill_the_server_in("sync"),
    "server killed, and again while it starts": kill_the_server_twice,
    "server stopped for two seconds": stop_the_server_for_a_while,
    "trainer killed": end_the_trainer(signal.SIGKILL),
    "trainer told to stop": end_the_trainer(signal.SIGTERM),
}


def strike(struck, trainer, fault, do):
    """Inject the fault and record it; False when the server or run to hit no longer exists."""
    try:
        struck.look(trainer)
        phase = do(struck, trainer)
    except (ValueError, OSError):
        return False
    struck.listed.append((world.steps_done(struck.home), fault, phase))
    return True


def wait_for_a_step(struck, trainer, what):
    """A resumed run first drops the steps after its checkpoint."""
    fewest = world.steps_done(struck.home)

    def more():
        nonlocal fewest
        fewest = min(fewest, world.steps_done(struck.home))
        return world.steps_done(struck.home) > fewest or not world.alive(trainer.pid)

    world.wait_for(more, what, seconds=180)


def faults_in_turn(rng):
    """Yield each kind of fault once, then each once more, in a new random order each round."""
    while True:
        yield from rng.sample(list(FAULTS), len(FAULTS))


def one_attempt(struck, trainer, faults):
    """Inject faults until one ends the run, or the run is done; then assert that the run has left nothing."""
    if struck.listed and struck.rng.random() < 0.5:
        world.wait_for(lambda: struck.phase == "start-up", "server", seconds=60)
        time.sleep(struck.rng.uniform(0, 3))
        strike(struck, trainer, AT_THE_START, kill_the_server)
    wait_for_a_step(struck, trainer, "a step after a start")
    fatal = False
    while world.alive(trainer.pid) and not fatal:
        time.sleep(struck.rng.uniform(2, 5))
        fault = next(faults)
        if world.alive(trainer.pid) and strike(struck, trainer, fault, FAULTS[fault]):
            fatal = fault.startswith("trainer")
            if not fatal:
                wait_for_a_step(struck, trainer, f"a step after {fault}")
    run = trainer.wait(seconds=180)
    with contextlib.suppress(AssertionError):
        world.wait_for(lambda: not struck.left(), "end of everything", seconds=20)
    assert not struck.left(), f"{struck.listed}\n{struck.left()}"
    return run


@contextlib.contextmanager
def watched(struck, trainer, seconds=1.0):
    """A context manager that records the run's resources every `seconds`."""
    ended = threading.Event()

    def watch():
        while not ended.wait(seconds):
            struck.look(trainer)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


def to_the_end(struck, steps):
    """Take the run to its end through all faults."""
    faults, resume = faults_in_turn(struck.rng), []
    while True:
        for name in ("trainer", "server"):
            (struck.home / name).write_text("")
        with world.running(struck.home, *options(steps), *resume, prepare=struck.tell, launched=True) as trainer:
            with watched(struck, trainer):
                run = one_attempt(struck, trainer, faults)
        if run.code == 0:
            return run
        assert run.code in (-signal.SIGKILL, 128 + signal.SIGTERM), f"{struck.listed}\n{run.out}\n{run.err}"
        resume = ["--resume"]


def flat(memory, steps):
    """Medians of the second and the last quarter of the steps, in MiB."""
    return [
        statistics.median(mb for step, mb in memory if low <= step < low + steps / 4)
        for low in (steps / 4, steps * 3 / 4)
    ]


@pytest.mark.full
@pytest.mark.timeout(3 * 3600)
def test_a_run_with_a_fault_every_few_seconds_equals_the_undisturbed_run(tmp_path):
    calm = Struck(tmp_path / "plain", random.Random(SEED))
    with world.running(calm.home, *options(STEPS), launched=True) as undisturbed, watched(calm, undisturbed):
        plain = undisturbed.wait(seconds=3600)
    assert plain.code == 0, plain.err
    struck, begun = Struck(tmp_path / "struck", random.Random(SEED)), time.monotonic()
    run = to_the_end(struck, STEPS)
    print("\n".join(f"step {step}: {fault}, in phase {phase}" for step, fault, phase in struck.listed))
    kinds, phases = (Counter(entry[place] for entry in struck.listed) for place in (1, 2))
    print(
        f"{STEPS} steps, {len(struck.listed)} faults in {time.monotonic() - begun:.0f} s: {dict(kinds)}; {dict(phases)}"
    )
    memory = {name: flat(each.memory, STEPS) for name, each in (("undisturbed", calm), ("struck", struck))}
    print("; ".join(f"memory {name} {early:.0f} MiB, {late:.0f} MiB" for name, (early, late) in memory.items()))
    assert set(kinds) == {*FAULTS, AT_THE_START} and {"generation", "sync", "start-up"} <= set(phases)
    assert [line["step"] for line in run.metrics] == list(range(1, STEPS + 1))
    told = [[(row["step"], row["prompt_id"], row["completion"]) for row in each.completions] for each in (run, plain)]
    assert told[0] == told[1] and Counter(step for step, *_ in told[0]) == {step: 16 for step in range(1, STEPS + 1)}
    weights = [world.plain_tensors(each.newest) for each in (run, plain)]
    assert weights[0].keys() == weights[1].keys() and all(
        torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items()
    )
    # One process until the end, with many reads and writes of checkpoints.
    assert (
        memory["undisturbed"][1] < 1.02 * memory["undisturbed"][0] and memory["struck"][1] < 1.1 * memory["struck"][0]
    )
