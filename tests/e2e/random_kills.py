"""Random kills of whole runs. Each killed run is resumed. It must end bit-identical to a run without kills, and leave
nothing behind.

    python tests/e2e/random_kills.py --seed 7 --kills 100

A kill is a signal (SIGKILL, SIGTERM or SIGSTOP) to a role of the run: launcher, a rank, supervisor, API server,
EngineCore, a vLLM worker, a reward worker, or supervisor and ranks together. torchrun's agent runs inside the launcher,
so the launcher stands for both. A stopped process gets SIGCONT after one to five seconds (test_hung_servers.py tests
endless hangs). The seed decides roles, signals and delays; the phase of each kill depends on the machine. `--keep
FOLDER` keeps runs without kills for the next call.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

if __name__ == "__main__":  # pytest's `pythonpath` does this for tests
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1] / "distributed")]

import torch

from tests.e2e import world
from tests.e2e.test_soak import born, listeners, listening, watched

STEPS = 5
PATIENCE = 300.0  # seconds within which a run ends or takes a step after a kill
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP)
SHARED = Path("/dev/shm")
OPTIONS = [f"run.max_steps={STEPS}", "run.save_steps=1", "run.save_total_limit=2", "rollout.max_restarts=1000"]
SETTINGS = {"1 rank": (1, []), "2 ranks": (2, []), "2 ranks, vLLM tp 2": (2, ["rollout.tp=2"])}


@dataclass
class Struck:
    """A run from start to end, restarted after each kill that ends it. `left` lists what outlived one of its starts."""

    setting: str
    home: Path
    rng: random.Random
    processes: dict[int, str] = field(default_factory=dict)  # id -> its start time
    files: set[Path] = field(default_factory=set)
    sockets: set[str] = field(default_factory=set)
    left: list[str] = field(default_factory=list)
    of_killed: set[Path] = field(default_factory=set)  # temporary folders that only the next start can remove

    def start(self, resume: bool) -> subprocess.Popen:
        """Start the run as a user does, with its own servers, and its output in files."""
        (self.home / "tmp").mkdir(parents=True, exist_ok=True)
        ranks, options = SETTINGS[self.setting]
        words = world.arguments(self.home, *OPTIONS, *options, launched=True)
        words.append("--resume" if resume else "run.overwrite=true")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "NPROC": str(ranks), "TMPDIR": str(self.home / "tmp")}
        with (self.home / "out").open("ab") as out:
            command = [world.REPOSITORY / "launch" / "local.sh", *words]
            return subprocess.Popen(command, env=environment, stdout=out, stderr=out, start_new_session=True)

    def look(self, root: int) -> None:
        """Record the run's current processes, files in shared memory and ports."""
        self.processes |= {
            pid: at for start in [root, *self.alive()] for pid in world.family(start) if (at := born(pid))
        }
        alive = self.alive()
        self.files |= world.shared_memory(alive)
        self.sockets |= listening(alive)

    def alive(self) -> list[int]:
        """Processes of the run that are still alive."""
        return [pid for pid, at in [*self.processes.items()] if born(pid) == at]

    def outlived(self) -> list[str]:
        """List the recorded processes, files and ports that still exist."""
        found = [f"process {pid}: {words(pid)}" for pid in self.alive()]
        found += [f"file {file}" for file in sorted(self.files) if file.exists()]
        found += [f"temporary file {file}" for file in self.temporary() - self.of_killed]
        return found + [f"listening socket {inode}" for inode in self.sockets & listeners()]

    def temporary(self) -> set[Path]:
        """Entries of the run's folder for temporary files."""
        return {*(self.home / "tmp").iterdir()}


def folders_of_killed(struck: Struck) -> set[Path]:
    """Temporary folders of launchers and ranks. A launcher killed with its supervisors leaves its folder; the next
    start removes it."""
    return {path for path in struck.temporary() if path.name.startswith("megagrpo_tmp_")}


def words(pid: int) -> str:
    """The command line, or title, of a process."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def rank_of(pid: int) -> str:
    """torchrun's name for the rank of a process and its children; "" without torchrun."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return ""
    return next((entry.decode()[5:] for entry in entries if entry.startswith(b"RANK=")), "")


def roles(root: int) -> dict[str, list[int]]:
    """The run's current processes by role."""
    found: dict[str, list[int]] = {}
    for pid in world.family(root):
        line = words(pid)
        if "supervisor.py" in line:
            found.setdefault("supervisor", []).append(pid)
            below = world.family(pid)[1:]
            if below:
                found.setdefault("API server", []).append(below[0])
            for other in below[1:]:
                title = words(other)
                role = "EngineCore" if "EngineCore" in title else "vLLM worker" if "Worker" in title else ""
                if role:
                    found.setdefault(role, []).append(other)
        elif "megagrpo.rewards.workers.worker" in line:
            found.setdefault("reward worker", []).append(pid)
        elif "-m megagrpo train" in line:
            found.setdefault("rank " + (rank_of(pid) or "0"), []).append(pid)
        elif pid == root:
            found.setdefault("launcher", []).append(pid)
    if "supervisor" in found:
        ranks = [pid for role, pids in found.items() if role.startswith("rank ") for pid in pids]
        found["supervisor and ranks"] = found["supervisor"] + ranks
    return found


def kills(setting: str, rng: random.Random) -> Iterator[tuple[str, signal.Signals]]:
    """Yield every pair of role and signal, in a new random order each round."""
    ranks = SETTINGS[setting][0]
    names = ["supervisor", "API server", "EngineCore", "vLLM worker", "reward worker", "supervisor and ranks"]
    names += [f"rank {rank}" for rank in range(ranks)] + ["launcher"] * (ranks > 1)
    pairs = [(role, number) for role in names for number in SIGNALS]
    while True:
        yield from rng.sample(pairs, len(pairs))


def strike(struck: Struck, root: subprocess.Popen, role: str, number: signal.Signals) -> str:
    """Wait for a process of that role and send it the signal. Returns a description, or "" if the run ended first."""
    sought = time.monotonic()
    while not (targets := roles(root.pid).get(role)):
        if root.poll() is not None or time.monotonic() - sought > PATIENCE:
            return ""
        time.sleep(0.02)
    struck.look(root.pid)
    targets = targets if role == "supervisor and ranks" else [struck.rng.choice(targets)]
    step, seconds = world.steps_done(struck.home), struck.rng.uniform(1, 5)
    for target in targets:
        with contextlib.suppress(ProcessLookupError):
            os.kill(target, number)
    if number == signal.SIGSTOP:
        time.sleep(seconds)
        for target in targets:
            with contextlib.suppress(ProcessLookupError):
                os.kill(target, signal.SIGCONT)
    return f"{role}, {number.name}" + f" for {seconds:.1f} s" * (number == signal.SIGSTOP) + f", after step {step}"


def one_start(
    struck: Struck, root: subprocess.Popen, todo: Iterator[tuple[str, signal.Signals]], budget: list[int]
) -> int:
    """Kill processes of the run until it ends; return its exit code. `budget` holds the number of kills left."""
    said = ""
    while root.poll() is None:
        if budget[0] > 0:
            before = world.steps_done(struck.home)
            if struck.rng.random() < 0.5:  # at any point of start-up
                time.sleep(struck.rng.uniform(0, 25))
            else:
                wait_for_a_step(struck, root)
                time.sleep(struck.rng.uniform(0, 2))
            if said := strike(struck, root, *next(todo)):
                budget[0] -= 1
                print(
                    f"  {time.strftime('%H:%M:%S')} {struck.setting}: {said} (of {STEPS}, {before} before)", flush=True
                )
        wait_for_a_step(struck, root)
    return root.returncode


def wait_for_a_step(struck: Struck, root: subprocess.Popen) -> None:
    """Wait until the run completes a step or ends. AssertionError when it hangs."""
    fewest, began = world.steps_done(struck.home), time.monotonic()
    while root.poll() is None and (now := world.steps_done(struck.home)) <= fewest:
        fewest = min(fewest, now)
        if time.monotonic() - began > PATIENCE:
            raise AssertionError(f"the run hangs; its output:\n{(struck.home / 'out').read_text()[-5000:]}")
        time.sleep(0.05)


def to_the_end(struck: Struck, todo: Iterator[tuple[str, signal.Signals]], budget: list[int]) -> list[int]:
    """Take the run through all kills to its end; return the exit codes of its starts. AssertionError when something is
    left behind."""
    codes = []
    while not codes or codes[-1] != 0:
        root = struck.start(resume=any((struck.home / "run" / "checkpoints").glob("step_*")))
        try:
            with watched(struck, root.pid, seconds=0.3):
                codes.append(one_start(struck, root, todo, budget))
                began, struck.of_killed = time.monotonic(), folders_of_killed(struck) if codes[-1] else set()
                while struck.outlived() and time.monotonic() - began < 20:
                    time.sleep(0.1)
                left = struck.outlived()
        finally:
            for pid in struck.alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            root.wait()
        if left:
            print("  LEFT BEHIND: " + "; ".join(left), flush=True)
            struck.left += left
        print(f"  exit code {codes[-1]}", flush=True)
        if len(codes) > 1 and budget[0] <= 0 and codes[-1] != 0 and codes[-2] != 0:
            raise AssertionError(f"the run does not go on:\n{(struck.home / 'out').read_text()[-5000:]}")
        struck.files.clear(), struck.sockets.clear()
    return codes


def result(home: Path) -> tuple[list, list, dict[str, torch.Tensor]]:
    """Everything that must be equal: each response with its reward, the loss of each step, and all tensors of the last
    checkpoint."""
    run = world.Run(0, "", "", home / "run")
    rows = [(row["step"], row["prompt_id"], row["completion"], row["reward"]) for row in run.completions]
    return rows, [(line["step"], line["loss"]) for line in run.metrics], world.plain_tensors(run.newest)


def differences(struck: Path, calm: Path) -> list[str]:
    """Differences between two finished runs; empty when they are bit-identical."""
    (rows, losses, tensors), (their_rows, their_losses, their_tensors) = result(struck), result(calm)
    found = [f"response {i}: {a} is not {b}" for i, (a, b) in enumerate(zip(rows, their_rows, strict=False)) if a != b][
        :3
    ]
    found += [f"{len(rows)} responses, not {len(their_rows)}"] * (len(rows) != len(their_rows))
    found += [f"losses {losses}, not {their_losses}"] * (losses != their_losses)
    found += [f"tensors {tensors.keys() ^ their_tensors.keys()}"] * (tensors.keys() != their_tensors.keys())
    return (
        found
        + [
            f"tensor {name}"
            for name in tensors.keys() & their_tensors.keys()
            if not tensors[name].equal(their_tensors[name])
        ][:3]
    )


def undisturbed(setting: str, kept: Path) -> Path:
    """The folder of a run with that setting and without kills; makes it if `kept` does not have it."""
    home = kept / setting.replace(" ", "_").replace(",", "")
    if not (home / "done").exists():
        shutil.rmtree(home, ignore_errors=True)
        calm = Struck(setting, home, random.Random(0))
        codes = to_the_end(calm, iter(()), [0])
        assert codes == [0] and not calm.left, f"{codes} {calm.left}\n{(home / 'out').read_text()[-5000:]}"
        (home / "done").touch()
    return home


def many_kills(seed: int, count: int, work: Path, kept: Path, settings: list[str]) -> list[str]:
    """Perform `count` kills, run by run, cycling through the settings; return the failures."""
    rng, budget, wrong = random.Random(seed), [count], []
    todo = {setting: kills(setting, rng) for setting in settings}
    number = 0
    while budget[0] > 0:
        setting = settings[number % len(settings)]
        calm = undisturbed(setting, kept)
        struck = Struck(setting, work / f"run{number}", rng)
        print(f"run {number}: {setting}, seed {seed}, {budget[0]} kills to go", flush=True)
        problems = []
        try:
            to_the_end(struck, todo[setting], budget)
            problems = differences(struck.home, calm)
        except AssertionError as error:
            problems = [str(error)]
        problems += [f"left behind: {what}" for what in struck.left]
        print(
            "\n".join(f"  WRONG: {problem}" for problem in problems) or "  equal to the undisturbed run, nothing left",
            flush=True,
        )
        wrong += [f"run {number} ({setting}): {problem}" for problem in problems]
        if not problems:
            shutil.rmtree(struck.home)
        number += 1
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--keep", type=Path, help="folder for undisturbed runs, which the next call finds there")
    given = parser.parse_args()
    warnings.filterwarnings("ignore", module="torch.distributed.checkpoint")
    print(f"seed {given.seed}, {given.kills} kills", flush=True)
    work = Path(tempfile.mkdtemp(prefix="random_kills_"))
    wrong = many_kills(given.seed, given.kills, work, given.keep or work / "undisturbed", given.settings)
    print(
        f"seed {given.seed}: {given.kills} kills, {len(wrong)} problems" + "".join(f"\n{problem}" for problem in wrong)
    )
    if not wrong:
        shutil.rmtree(work)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
