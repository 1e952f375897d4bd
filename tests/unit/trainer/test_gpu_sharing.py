"""Turns on the GPU: the calls of trainer and engine, in order, and the state after an exception."""

import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from megagrpo.engine.http.protocol import EngineError
from megagrpo.trainer.gpu import gpu_sharing
from megagrpo.trainer.gpu.gpu_sharing import GPU_TABLE, GpuTurn, GpuTurns
from megagrpo.trainer.gpu.state_offload import NoOffload
from tests.rank_fakes import OneRank


@dataclass
class Memory:
    """A GPU's memory and its two users: records every call, and rejects a second user."""

    calls: list[str] = field(default_factory=list)
    trainer: str = "nothing"
    engine: str = "dropped"
    fails: str = ""  # the call that raises

    def note(self, call: str) -> None:
        self.calls.append(call)
        if call == self.fails:
            raise EngineError(f"{call} failed")


class TrainerState(NoOffload):
    """Records the calls of `Offload`."""

    def __init__(self, memory: Memory):
        self.memory = memory

    @property
    def away(self) -> bool:
        return self.memory.trainer != "everything"

    def _move(self, call: str, to: str) -> None:
        self.memory.note(call)
        assert self.memory.engine != "kv cache" or to == "nothing", "trainer and KV cache are on the GPU together"
        self.memory.trainer = to

    def load_all(self) -> None:
        self._move("load_all", "everything")

    def load_weights_only(self) -> None:
        self._move("load_weights_only", "weights")

    def offload_all(self) -> None:
        self._move("offload_all", "nothing")


class SleepyEngine:
    """Records the calls of a server that sleeps; a second `sleep` does nothing, as in `Updates`."""

    def __init__(self, memory: Memory):
        self.memory, self.asleep = memory, True

    def sleep(self, keeps_weights: bool = False, last: bool = False) -> None:
        if not self.asleep:
            self.asleep, self.memory.engine = True, "silent"  # until it responds
            self.memory.note(f"sleep keeps_weights={keeps_weights} last={last}")
            self.memory.engine = "host" if keeps_weights else "dropped"

    def wake(self) -> None:
        self.memory.note("wake")
        assert self.memory.engine == "host", "only weights that were kept can be woken"
        self.serve()

    def serve(self) -> None:
        assert self.memory.trainer == "nothing", "trainer and KV cache are on the GPU together"
        self.memory.engine, self.asleep = "kv cache", False


class Run:
    """The turns of a run on one rank, with a weight sync that calls its handover as `WeightSync.push` does."""

    def __init__(self, sleeps: bool = True):
        self.memory = Memory()
        self.engine, offload = SleepyEngine(self.memory), TrainerState(self.memory)
        if not sleeps:
            self.memory.trainer = "everything"
        stop = lambda: self.memory.note("stop_if_requested")  # noqa: E731
        self.turns = GpuTurns(OneRank(), self.engine, sleeps, offload if sleeps else NoOffload(), stop)

    def sync(self, dies: int = 0) -> None:
        with self.turns.syncing() as handover:
            for attempt in range(dies + 1):
                handover.before_sending()
                self.memory.note("send")
                handover.before_serving()
                self.memory.note("resume") if attempt == dies else self.memory.note("server died")
            self.engine.serve()

    def taken(self) -> list[str]:
        """The calls since the last call of this method."""
        calls, self.memory.calls = self.memory.calls, []
        return calls


SLEEP, NAP, LAST_NAP = (
    f"sleep keeps_weights={keeps} last={last}" for keeps, last in ((False, False), (True, False), (True, True))
)
SYNC = ["load_weights_only", "send", "offload_all", "resume"]
TAKE = ["stop_if_requested", SLEEP, "load_all"]


def test_each_turn_calls_its_verbs_in_this_order():
    run = Run()
    run.memory.trainer = "everything"  # after loading the policy
    run.sync()
    assert run.taken() == SYNC and run.turns.turn is GpuTurn.GENERATING
    with run.turns.generating():
        assert run.taken() == []
    with run.turns.training():
        assert run.taken() == TAKE and run.turns.turn is GpuTurn.TRAINING
    run.sync()
    assert run.taken() == SYNC
    with run.turns.checkpoint(last=False):
        assert run.taken() == [NAP, "load_all"] and run.turns.turn is GpuTurn.CHECKPOINT
    assert run.taken() == []  # servers sleep on until they are needed
    with run.turns.generating():
        assert run.taken() == ["offload_all", "wake"] and run.turns.turn is GpuTurn.GENERATING
    with run.turns.checkpoint(last=True):
        assert run.taken() == [LAST_NAP, "load_all"]


def test_a_sync_that_restarts_loads_the_weights_again():
    run = Run()
    run.sync(dies=1)
    assert run.taken() == [*SYNC[:3], "server died", *SYNC]


def test_servers_that_lost_their_weights_sleep_before_they_get_them_again():
    run = Run()
    run.sync()
    run.taken()
    with run.turns.generating():
        run.sync()
    assert run.taken() == [*TAKE, *SYNC] and run.turns.turn is GpuTurn.GENERATING


def test_a_trainer_with_a_gpu_of_its_own_moves_nothing_and_calls_no_engine():
    run = Run(sleeps=False)
    for turn in (run.turns.generating, run.turns.training, run.turns.syncing, lambda: run.turns.checkpoint(last=True)):
        with turn():
            pass
    assert run.taken() == []


def test_the_memory_after_each_turn_begins_is_that_of_the_table():
    run, users = Run(), {"gpu": "kv cache", "host": "host", "dropped": "dropped"}

    def check(turn: GpuTurn) -> None:
        row = GPU_TABLE[turn]
        state = "everything" if row.trainer_state else "weights" if row.policy_weights else "nothing"
        assert (run.memory.trainer, run.memory.engine) == (state, users[row.engine_weights])

    run.sync()
    for _ in range(2):
        with run.turns.generating():
            check(GpuTurn.GENERATING)
        with run.turns.training():
            check(GpuTurn.TRAINING)
        run.sync()
        with run.turns.checkpoint(last=False):
            check(GpuTurn.CHECKPOINT)


@pytest.mark.parametrize(
    "fails", ["stop_if_requested", SLEEP, "load_all", "load_weights_only", "send", "offload_all", "resume", "wake"]
)
def test_after_an_exception_in_any_turn_a_checkpoint_finds_the_whole_trainer_on_the_gpu(fails):
    run = Run()
    run.memory.trainer = "everything"
    run.sync()
    if fails == "wake":
        with run.turns.checkpoint(last=False):
            pass
    run.memory.fails = fails
    with pytest.raises(EngineError):
        with run.turns.generating():
            pass
        with run.turns.training():
            pass
        run.sync()
    assert fails in run.taken()
    run.memory.fails = ""
    with run.turns.checkpoint(last=True):
        assert run.memory.trainer == "everything" and run.memory.engine != "kv cache"


@pytest.mark.parametrize("turn", ["generating", "training", "syncing"])
def test_after_an_exception_of_a_turns_own_work_a_checkpoint_finds_the_whole_trainer_on_the_gpu(turn):
    run = Run()
    run.sync()
    with pytest.raises(KeyError), getattr(run.turns, turn)():
        raise KeyError("the work failed")
    with run.turns.checkpoint(last=True):
        assert run.memory.trainer == "everything" and run.memory.engine != "kv cache"


def test_a_server_that_does_not_respond_does_not_block_a_checkpoint():
    run = Run()
    run.sync()
    run.memory.fails = NAP
    with run.turns.checkpoint(last=False):
        assert run.memory.trainer == "everything"


def test_the_docstring_shows_the_table():
    rows = re.findall(r"^\| (\w+) +\| (\w+) +\| (\w+) +\| (\w+) +\|$", gpu_sharing.__doc__, re.MULTILINE)
    words = {True: "yes", False: "no", "gpu": "yes"}
    table = [[t.value, r.policy_weights, r.trainer_state, r.engine_weights] for t, r in GPU_TABLE.items()]
    assert [list(row) for row in rows] == [[words.get(cell, cell) for cell in row] for row in table]


def test_only_the_turns_move_trainer_and_engine():
    """Other rooms and the trainer's other files define these methods and do not call them."""
    verbs = re.compile(r"\.(load_all|load_weights_only|offload_all|wake)\(")
    package = Path(gpu_sharing.__file__).parents[2]
    callers = {str(path.relative_to(package)) for path in package.rglob("*.py") if verbs.search(path.read_text())}
    assert callers == {"trainer/gpu/gpu_sharing.py"}
