"""A reward worker that breaks the protocol affects no other worker; reward values and output are checked."""

import asyncio
import datetime
import math
import os
import re
import signal
import socket
import struct
import time
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace

import pytest

from megagrpo.config import MultiTurnSection
from megagrpo.environments.episodes.conversation import Conversation
from megagrpo.environments.responders import Responders
from megagrpo.rewards.registry.reward_values import MAX_REWARD, reward_of, rewards_of
from megagrpo.rewards.registry.target import Target
from megagrpo.rewards.workers.channel import MAX_MESSAGE_BYTES, Channel, Frames, ProtocolError, as_json, from_json
from megagrpo.rewards.workers.output import BURST
from megagrpo.types import Prompt, Turn
from tests.unit.rewards.test_workers import rewards_of as rewards_named
from tests.unit.rewards.test_workers import rollouts, scorer

ROOT = Path(__file__).parents[3]
HOSTILE = """
import json, os, pickle, socket, stat, struct, sys, time

def good(completions, **columns):
    return [1.0] * len(completions)

def connection():
    return next(fd for fd in sorted(map(int, os.listdir("/proc/self/fd"))) if fd > 2 and is_socket(fd))

def is_socket(fd):
    try:
        return stat.S_ISSOCK(os.fstat(fd).st_mode)
    except OSError:
        return False

def frame(text):
    return struct.pack(">I", len(text)) + text

def returns_twice(completions):
    os.fork()
    return [1.0] * len(completions)

class Evil:
    def __reduce__(self):
        return os.mkdir, (PROOF,)

def writes(completions, what, proof):
    global PROOF
    PROOF = proof[0]
    if "bad" in completions:
        junk = {
            "pickle": frame(pickle.dumps(Evil())),
            "text": b"hello, this is no frame",
            "unknown": frame(json.dumps([10_000, "result", [1.0], 0.1]).encode()),
            "over": frame(json.dumps([1, "result", [[1.0], {"columns": {}, "metrics": {}, "problems": []}], 0.1]).encode()),
            "too long": struct.pack(">I", (1 << 32) - 1),
            "deep": frame(b"[" * 100_000),
            "dict": frame(b'{"a": 1}'),
            "many": frame(b"[1, \\"started\\"]") * 1000 + frame(b"[null, 2]"),
        }[what[0]]
        os.write(connection(), junk)
        time.sleep(0.2)
    return [1.0] * len(completions)

def half_a_message(completions):
    if "bad" in completions:
        os.write(connection(), struct.pack(">I", 100) + b"[1, ")
        time.sleep(3600)
    return [1.0] * len(completions)

def drips(completions):
    if "bad" in completions:
        os.write(connection(), struct.pack(">I", 1_000_000))
        while True:
            os.write(connection(), b" ")
            time.sleep(0.01)
    return [1.0] * len(completions)

def odd(completions):
    return [{"text": "3.5", "dict": {"a": 1}, "list": [1], "huge": 1e308, "int": 10**400, "minus": -1e16, "nan": float("nan")}.get(c, True)
            for c in completions]

def a_dict(completions):
    return dict.fromkeys(range(len(completions)), 1.0)

def a_string(completions):
    return "1" * len(completions)

def half_a_million(completions):
    return [5e14] * len(completions)

def shouts(completions):
    for _ in range(2000):
        print("\\x1b]52;c;" + "x" * 1000)
    return [1.0] * len(completions)

def token(completions):
    environments = [read(f"/proc/{pid}/environ") for pid in os.listdir("/proc") if pid.isdigit()]
    return [float(any(b"a-secret-of-this-test" in text for text in environments))] * len(completions)

def read(path):
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""
"""
TOOLS = """
import os, struct, json

class Episode:
    def reset(self, **columns):
        self.how = columns.get("how")

    def act(self, x: int) -> str:
        '''Acts.

        Args:
            x: Anything.
        '''
        if self.how == "fork":
            os.fork()
        if self.how == "numbers":
            text = json.dumps({"value": [1, 2]}).encode()
            os.write(self._own_socket(), struct.pack(">I", len(text)) + text)
        if self.how == "junk":
            os.write(self._own_socket(), b"\\x80\\x04 no frame at all")
        return "done"

    def _own_socket(self):
        import stat
        fds = sorted(int(fd) for fd in os.listdir("/proc/self/fd"))
        sockets = [fd for fd in fds if fd > 2 and os.path.exists(f"/proc/self/fd/{fd}") and stat.S_ISSOCK(os.fstat(fd).st_mode)]
        return sockets[-1]

    def get_reward(self):
        return "high" if self.how == "text" else 0.25
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("hostile")
    (path / "mine.py").write_text(HOSTILE)
    (path / "tools.py").write_text(TOOLS)
    return path


def test_a_function_that_forks_and_returns_twice_scores_once(folder):
    with scorer(folder, f"{folder}/mine.py:returns_twice", f"{folder}/mine.py:good", workers=1) as s:
        for _ in range(3):
            scored = s.score(rollouts("a", "b", "c", group=3))
            assert rewards_named(scored, "returns_twice") == rewards_named(scored, "good") == [1.0] * 3
        assert s.metrics()["rewards/returns_twice/exceptions"] == s.metrics()["rewards/good/exceptions"] == 0


def test_bytes_on_the_connection_cost_the_worker_and_run_nothing(folder, tmp_path):
    kinds = ["pickle", "text", "unknown", "over", "too long", "deep", "dict", "many"]
    with scorer(
        folder, {"function": f"{folder}/mine.py:writes", "independent": True}, f"{folder}/mine.py:good", workers=1
    ) as s:
        columns = {"proof": str(tmp_path / "it ran")}
        bad = [rollout for kind in kinds for rollout in rollouts("bad", columns=columns | {"what": kind})]
        scored = s.score([*bad, *rollouts("a", "c", columns=columns | {"what": "nothing"})])
        assert (
            rewards_named(scored, "writes") == [0.0] * len(kinds) + [1.0, 1.0]
            and rewards_named(scored, "good") == [1.0] * 10
        )
        assert s.metrics()["rewards/writes/exceptions"] == len(kinds) and s.metrics()["rewards/good/exceptions"] == 0
    assert not (tmp_path / "it ran").exists()


@pytest.mark.parametrize("function", ["half_a_message", "drips"])
def test_half_a_message_is_over_by_the_deadline(folder, function):
    with scorer(folder, f"{folder}/mine.py:{function}", timeout=0.5) as s:
        begun = time.monotonic()
        assert rewards_named(s.score(rollouts("a", "bad", "c")), function) == [1.0, 0.0, 1.0]
        assert s.metrics()[f"rewards/{function}/timeouts"] == 1 and time.monotonic() - begun < 60


def test_a_worker_that_takes_no_bytes_does_not_hold_the_trainer(folder):
    own = {"function": f"{folder}/mine.py:good", "own_worker": True, "name": "own"}
    with scorer(folder, f"{folder}/mine.py:good", own, timeout=600, workers=1) as s:
        stopped = s._pool._workers[0].process.pid
        os.kill(stopped, signal.SIGSTOP)
        with s.begin(names=["good"]) as held, s.begin(names=["own"]) as other:
            held.add(0, rollouts("x" * 50_000_000))
            other.add(0, rollouts("a"))
            assert rewards_named(other.finish(), "own") == [1.0] and held._open
            os.kill(stopped, signal.SIGCONT)
            assert rewards_named(held.finish(), "good") == [1.0]


def test_numbers_and_other_types_survive_the_way_to_a_worker_exactly():
    floats = [0.1, -0.0, 5e-324, 1.7976931348623157e308, 1 / 3, math.inf, -math.inf]
    value = {
        "floats": floats,
        "nested": [(1, "two", (None, True)), {3: {"set", "of"}}, {"\0type": ["tuple", []]}],
        "times": [
            datetime.datetime(2026, 1, 2, 3, 4, 5, 6),
            datetime.date(2026, 1, 2),
            datetime.timedelta(1, 2, 3),
            datetime.time(1),
        ],
        "bytes": b"\x00\xff",
        "exact": [Decimal("0.10"), 2 + 3j, 10**100],
        "text": "\ud800 lone, \x00 zero, ⏎ and \u202e",
        "state": SimpleNamespace(global_step=7),
        "target": Target("file.py", "name", (("path", "x"),), True),
    }
    ours, theirs = (Channel(end) for end in socket.socketpair())
    ours.send(as_json(value))
    ours.send([math.nan, 0.1 + 0.2])
    assert from_json(theirs.receive(5)) == value and [math.copysign(1, x) for x in floats[:2]] == [1, -1]
    nan, number = theirs.receive(5)
    assert math.isnan(nan) and number == 0.1 + 0.2
    with pytest.raises(
        TypeError, match=r"a builtins\.object cannot be passed to a worker; convert it to numbers, text, lists or dicts"
    ):
        as_json({"column": object()})


def test_what_is_no_message_is_refused_without_being_read_as_code():
    for junk, problem in (
        (struct.pack(">I", MAX_MESSAGE_BYTES + 1), "announced a message of"),
        (struct.pack(">I", 5) + b"{nope", "not JSON"),
        (struct.pack(">I", 5000) + b"9" * 5000, "not JSON"),  # an integer that Python refuses to read
    ):
        with pytest.raises(ProtocolError, match=problem):
            list(Frames().add(junk))
    ours, theirs = socket.socketpair()
    theirs.sendall(struct.pack(">I", 4) + b"[1")
    with pytest.raises(TimeoutError):
        Channel(ours).receive(0.05)
    theirs.close()
    with pytest.raises(EOFError):
        Channel(ours).receive(0.05)
    with pytest.raises(ValueError, match="a message of"):
        Channel(ours).send("x" * (MAX_MESSAGE_BYTES + 1))


def test_a_column_that_cannot_be_passed_is_an_error_of_the_call_and_names_the_type(folder, caplog):
    with scorer(folder, f"{folder}/mine.py:good") as s:
        assert rewards_named(s.score(rollouts("a", columns={"thing": object()})), "good") == [0.0]
    assert "its arguments cannot be sent to a worker: a builtins.object cannot be passed" in caplog.text


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("3.5", "it returned a str, '3.5'; a reward must be a number or None"),
        ({"a": 1}, "it returned a dict, {'a': 1}; a reward must be a number or None"),
        ([1], "it returned a list, [1]; a reward must be a number or None"),
        (1e308, "it returned 1e+308; it must lie within ±1e+15, or the statistics of a step overflow float32"),
        (-1e16, "it returned -1e+16; it must lie within"),
        (10**400, "it returned inf, which is not finite"),
        (math.nan, "it returned nan, which is not finite"),
    ],
)
def test_a_value_that_is_no_reward_is_named(value, problem):
    (told,) = rewards_of([value], 1)
    assert told.startswith(problem)


def test_a_value_that_is_no_reward_is_an_error_of_its_sample(folder, caplog):
    odd = ["text", "dict", "list", "huge", "minus", "int", "nan"]
    with scorer(folder, f"{folder}/mine.py:odd") as s:
        assert rewards_named(s.score(rollouts("x", *odd, "y")), "odd") == [1.0, *[0.0] * len(odd), 1.0]
        assert s.metrics()["rewards/odd/exceptions"] == len(odd)
    # the first failure depends on the workers
    assert re.search("it returned .*(; a reward must|, which is not finite)", caplog.text)


def test_rewards_that_are_no_list_are_an_error_and_their_type_is_named(folder, caplog):
    with scorer(folder, f"{folder}/mine.py:a_dict", f"{folder}/mine.py:a_string") as s:
        assert [r.reward for r in s.score(rollouts("a", "b"))] == [0.0, 0.0]
    assert (
        "it returned a dict for 1 completions; return a list" in caplog.text
        and "it returned a str for 1 completions" in caplog.text
    )


def test_a_weight_that_makes_a_reward_too_large_is_an_error(folder, caplog):
    with scorer(folder, {"function": f"{folder}/mine.py:half_a_million", "weight": 4.0}) as s:
        assert [r.reward for r in s.score(rollouts("a"))] == [0.0]
    assert "it returned 5e+14, which with weight 4 is beyond ±1e+15" in caplog.text


def test_numbers_of_numpy_and_torch_are_rewards():
    numpy, torch = pytest.importorskip("numpy"), pytest.importorskip("torch")
    values = [numpy.float32(0.1), numpy.int64(2), numpy.bool_(True), numpy.array(1.5), torch.tensor(2.5), 1, None, True]
    assert rewards_of(values, 8) == [float(numpy.float32(0.1)), 2.0, 1.0, 1.5, 2.5, 1.0, None, 1.0]
    assert (
        rewards_of(torch.tensor([1.0, 2.0]), 2)
        == rewards_of(numpy.array([1, 2]), 2)
        == rewards_of((x for x in (1, 2)), 2)
        == [1.0, 2.0]
    )
    assert reward_of(MAX_REWARD) == MAX_REWARD and reward_of(-0.1) == -0.1


def test_what_a_reward_prints_is_cut_and_cannot_steer_the_terminal(folder, capfd):
    with scorer(folder, f"{folder}/mine.py:shouts", workers=1) as s:
        assert [r.reward for r in s.score(rollouts("a"))] == [1.0]
    printed = capfd.readouterr().err
    assert BURST / 2 < len(printed) < 2 * BURST and "\x1b" not in printed and printed.startswith(r"\x1b]52;c;xxx")
    assert (
        printed.count("a reward worker has printed 256 KiB; output above 1024 bytes per second is dropped from now on")
        == 1
    )


# ------------------------------------------------------------------------------------------------------------- episodes


@pytest.fixture(scope="module")
def responders(folder):
    with Responders(MultiTurnSection(environment=f"{folder}/tools.py:Episode", timeout=5, workers=1)) as made:
        yield made


def play(responders, how):
    """A conversation whose environment misbehaves once in this way, and the text of the tool message."""
    conversation = Conversation(Prompt(0, (1,), "Q", {"how": how}), 0, 0, [{"role": "user", "content": "Q"}], 100)
    conversation.turns = [Turn(0, 0)]
    responders.log_next_failure()
    asyncio.run(responders.begin(conversation))
    (message,) = asyncio.run(responders.use_tools(conversation, [{"name": "act", "arguments": {"x": 1}}]))
    return conversation, message["content"]


@pytest.mark.parametrize("how", ["numbers", "junk"])
def test_an_episode_that_breaks_the_protocol_is_over_and_the_next_one_is_not(responders, how):
    conversation, said = play(responders, how)
    assert "its process broke the protocol" in said and conversation.ended == "failed"
    conversation, said = play(responders, "well")
    assert said == "done" and not conversation.ended


def test_an_episode_that_forks_answers_once(responders):
    conversation, said = play(responders, "fork")
    assert said == "done"
    asyncio.run(responders.finish(conversation))
    assert conversation.rewards == {"Episode": 0.25}


def test_an_environment_that_gives_text_for_a_reward_gets_0(responders, caplog):
    conversation, _ = play(responders, "text")
    asyncio.run(responders.finish(conversation))
    assert (
        conversation.rewards == {"Episode": 0.0}
        and "it returned a str, 'high'; a reward must be a number or None" in caplog.text
    )


def test_the_package_receives_no_pickles_from_other_processes():
    """`Connection.recv` unpickles messages; the code must use only `recv_bytes`."""
    sources = {path: path.read_text() for path in (ROOT / "megagrpo").rglob("*.py")}
    assert not [path.name for path, text in sources.items() if "connection.recv(" in text or ".recv()" in text]
