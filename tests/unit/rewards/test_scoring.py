"""Rewards run in parallel with generation and with each other: groups scored on arrival, coroutines, classes,
separate workers."""

import time
from pathlib import Path

import pytest

from megagrpo.config import RewardsSection
from megagrpo.config.basics.paths import anchored
from megagrpo.rewards.registry.target import Target
from megagrpo.rewards.scorer import RewardScorer
from megagrpo.rewards.scoring import Function
from megagrpo.rewards.workers import pool as pool_module
from megagrpo.rewards.workers.pool import Call, WorkerPool
from megagrpo.types import Prompt, Rollout

MINE = """
import asyncio, os, time

async def naps(completions):
    await asyncio.sleep(0.5)
    return [1.0] * len(completions)

async def naps_too(completions):
    await asyncio.sleep(0.5)
    return [2.0] * len(completions)

async def never(completions):
    await asyncio.sleep(3600 if "hang" in completions else 0.2)
    return [1.0] * len(completions)

def hangs(completions):
    if "hang" in completions:
        time.sleep(3600)
    return [1.0] * len(completions)

async def blocks(completions):
    if "hang" in completions:
        time.sleep(3600)
    await asyncio.sleep(0.1)
    return [1.0] * len(completions)

async def dies(completions):
    await asyncio.sleep(0.1)
    if "die" in completions:
        os._exit(7)
    await asyncio.sleep(0.4)
    return [1.0] * len(completions)

async def raises(completions):
    raise KeyError("coroutine")

def process(completions):
    return [float(os.getpid())] * len(completions)

def slowly(completions):
    time.sleep(0.3)
    return [float(len(completions))] * len(completions)

def stamp(completions):
    return [time.time()] * len(completions)

class Length:
    def __init__(self, scale=1.0):
        self.scale, self.calls = scale, 0
    def __call__(self, completions, answer, **kwargs):
        self.calls += 1
        return [self.scale * len(c) + len(a) for c, a in zip(completions, answer)]

class Asynchronous:
    async def __call__(self, completions, **kwargs):
        await asyncio.sleep(0.01)
        return [4.0] * len(completions)

class SwiftStyle:
    def __init__(self, args=None, **kwargs):
        assert args is None
    def __call__(self, completions, solution, **kwargs):
        return [float(c == s and kwargs["finish_reason"][i] == "stop") for i, (c, s) in enumerate(zip(completions, solution))]

def left_out(completions):
    raise RuntimeError("cannot tell")
left_out.value_of_failure = None

def one_at_a_time(completions):
    return [float(len(completions))] * len(completions)
one_at_a_time.completions_per_call = 1
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("user")
    (path / "mine.py").write_text(MINE)
    return path


def scorer(folder, *functions, **section):
    listed = [dict(f) if isinstance(f, dict) else {"function": f"mine.py:{f}"} for f in functions]
    section = RewardsSection(**anchored({"rewards": {"functions": listed, **section}}, folder)["rewards"])
    return RewardScorer(section, max_completion_length=100, base_folder=folder)


def rollouts(*texts, group=1, messages="Q", columns=None, first=0):
    prompts = [Prompt(first + i // group, (1,), messages, columns or {}) for i in range(len(texts))]
    return [Rollout(p, (1, 2), (0.0, 0.0), "stop", 0, t) for p, t in zip(prompts, texts, strict=True)]


def values(scored, name):
    return [s.rewards[name] for s in scored]


def test_coroutines_run_side_by_side_over_functions_and_groups(folder):
    with scorer(folder, "naps", "naps_too") as s:
        begun = time.monotonic()
        scored = s.score(rollouts(*"abcdefgh"))
        assert time.monotonic() - begun < 2.5  # one after the other: 8 seconds
        assert [r.reward for r in scored] == [3.0] * 8


def test_so_many_calls_of_coroutines_run_at_once_as_concurrency_says(folder):
    with scorer(folder, "naps", concurrency=2) as s:
        begun = time.monotonic()
        s.score(rollouts(*"abcd"))
        assert 1.0 <= time.monotonic() - begun
        assert 0.9 < s.metrics()["rewards/naps/seconds"]
    with pytest.raises(ValueError, match=r"functions\[0\].own_worker: `naps` is async"):
        scorer(folder, {"function": "mine.py:naps", "own_worker": True})


def test_a_coroutine_is_cancelled_at_its_deadline_and_the_others_go_on(folder):
    with scorer(folder, "never", timeout=1.0) as s:
        worker = s._pool._workers[-1].process.pid
        begun = time.monotonic()
        assert values(s.score(rollouts("a", "hang", "c")), "never") == [1.0, 0.0, 1.0]
        assert time.monotonic() - begun < 2.5 and s._pool._workers[-1].process.pid == worker
        assert s.metrics()["rewards/never/timeouts"] == 1


def test_a_coroutine_that_blocks_costs_its_worker_and_the_innocent_are_called_again(folder, monkeypatch):
    monkeypatch.setattr(pool_module, "REPORT_SECONDS", 0.5)
    with scorer(folder, "blocks", timeout=0.5) as s:
        assert values(s.score(rollouts("a", "hang", "c", "d")), "blocks") == [1.0, 0.0, 1.0, 1.0]
        assert s.metrics()["rewards/blocks/timeouts"] == 1 and s.metrics()["rewards/blocks/exceptions"] == 0


def test_a_worker_of_coroutines_that_dies_costs_the_culprit_only(folder, caplog):
    with scorer(folder, "dies") as s:
        assert values(s.score(rollouts("a", "die", "c")), "dies") == [1.0, 0.0, 1.0]
        assert s.metrics()["rewards/dies/exceptions"] == 1
    assert "the worker died (exit code 7)" in caplog.text


def test_a_coroutine_that_raises_is_shown_with_its_own_traceback(folder, caplog):
    with scorer(folder, "raises") as s:
        assert values(s.score(rollouts("a", "b")), "raises") == [0.0, 0.0]
        assert s.metrics()["rewards/raises/exceptions"] == 2
    assert 'mine.py", line' in caplog.text and "KeyError: 'coroutine'" in caplog.text


def test_a_failure_is_shown_once_in_a_run_with_its_sample_and_then_counted(folder, caplog):
    with scorer(folder, "raises", "left_out") as s:
        s.score(rollouts("first", columns={"answer": "42"}))
        s.score(rollouts("second" * 1000))
        assert s.metrics()["rewards/raises/exceptions"] == 1
    shown = [record.getMessage() for record in caplog.records]
    assert len(shown) == 2
    raised = next(message for message in shown if "`raises`" in message)
    assert all(
        part in raised for part in ("prompt 0", "rewards/", "Traceback", "  completion  'first'", "  answer      '42'")
    )


def test_a_function_may_leave_out_what_it_fails_on(folder):
    with scorer(folder, "left_out", "slowly") as s:
        scored = s.score(rollouts("a", "b", group=2))
        assert values(scored, "left_out") == [None, None] and [r.reward for r in scored] == [2.0, 2.0]
        metrics = s.metrics()
        assert metrics["rewards/left_out/exceptions"] == metrics["rewards/left_out/unscorable"] == 2


def test_a_function_says_how_many_completions_it_takes_in_a_call(folder):
    with scorer(folder, "one_at_a_time") as s:
        assert values(s.score(rollouts(*"abcd", group=4)), "one_at_a_time") == [1.0] * 4


def test_a_call_sends_only_what_its_function_takes(folder, caplog):
    with scorer(folder, {"function": "exact_number"}) as s:
        asked = rollouts("1", "2", columns={"answer": "2", "picture": object()})  # no worker can be sent an object
        assert values(s.score(asked), "exact_number") == [0.0, 1.0] and not caplog.records


def test_classes_are_made_once_with_args_and_then_called(folder):
    columns = {"answer": "xy", "solution": "abc"}
    functions = [
        {"function": "mine.py:Length", "args": {"scale": 10}},
        {"function": "mine.py:Asynchronous"},
        {"function": "mine.py:SwiftStyle"},
    ]
    with scorer(folder, *functions) as s:
        s.check_columns(columns)
        scored = s.score(rollouts("abc", columns=columns))
        assert scored[0].rewards == {"Length": 32.0, "Asynchronous": 4.0, "SwiftStyle": 1.0}
        with pytest.raises(ValueError, match="`Length` needs column `answer`"):
            s.check_columns(["solution"])
    with pytest.raises(
        ValueError,
        match=r"functions\[0\].args.scales: `Length` has no such argument; did you mean `scale`\?; it takes scale",
    ):
        scorer(folder, {"function": "mine.py:Length", "args": {"scales": 10}})


def test_a_function_may_have_a_worker_of_its_own_and_a_deadline_of_its_own(folder):
    own = {"function": "mine.py:process", "own_worker": True, "name": "own"}
    with scorer(folder, own, "process", {"function": "mine.py:slowly", "timeout": 0.1}, workers=1) as s:
        scored = s.score(rollouts("a", "b"))
        assert len({*values(scored, "own"), *values(scored, "process")}) == 2
        assert s.metrics()["rewards/slowly/timeouts"] == 2


def test_groups_are_scored_while_others_are_still_to_come(folder):
    with scorer(folder, "stamp") as s, s.begin() as scoring:
        scoring.add(1, rollouts("b", "bb", group=2, first=1))
        time.sleep(0.6)
        between = time.time()
        scoring.add(0, rollouts("a", "aa", group=2))
        scored = scoring.finish()
        assert [r.rollout.text for r in scored] == ["a", "aa", "b", "bb"]  # in the order of the prompts, not of arrival
        assert values(scored, "stamp")[2] < between - 0.1 < between < values(scored, "stamp")[0]


def test_scorings_go_on_beside_each_other_and_each_counts_its_own(folder):
    with scorer(folder, "never", "raises", timeout=2.0) as s, s.begin() as slow, s.begin() as quick:
        slow.add(0, rollouts("hang"))
        quick.add(0, rollouts("a", "b", group=2))
        assert values(quick.finish(), "never") == [1.0, 1.0] and slow._open
        assert values(slow.finish(), "never") == [0.0]
        counted = [
            [scoring.metrics()[f"rewards/{name}"] for name in ("never/timeouts", "raises/exceptions")]
            for scoring in (slow, quick)
        ]
        assert counted == [[1.0, 1.0], [0.0, 2.0]]


def test_a_scoring_that_is_dropped_frees_the_worker_that_the_others_wait_for(folder):
    with scorer(folder, "hangs", timeout=60, workers=1) as s, s.begin() as kept:
        begun = time.monotonic()
        with s.begin() as dropped:
            for place in range(3):
                dropped.add(place, rollouts("hang"))
            time.sleep(0.3)
            kept.add(0, rollouts("a"))
        assert values(kept.finish(), "hangs") == [1.0] and time.monotonic() - begun < 5


def test_scoring_that_is_given_up_leaves_the_workers_ready_for_the_next(folder):
    with scorer(folder, "never", "slowly", timeout=60) as s:
        begun = time.monotonic()
        with pytest.raises(RuntimeError, match="given up"), s.begin() as scoring:
            scoring.add(0, rollouts("hang"))
            raise RuntimeError("given up")
        assert time.monotonic() - begun < 5
        assert values(s.score(rollouts("a", "b", group=2)), "slowly") == [2.0, 2.0]


def test_an_error_of_ours_in_the_middle_reaches_the_caller(folder):
    with scorer(folder, "slowly") as s:
        with s.begin() as ahead:
            with pytest.raises(AttributeError):
                ahead.add(0, ["no rollout"])
        assert values(s.score(rollouts("a")), "slowly") == [1.0]
        s.functions["slowly"].weight = "no number"  # the thread of the workers multiplies by it
        with pytest.raises(TypeError):
            s.score(rollouts("b"))


def test_a_scorer_that_is_closed_ends_a_scoring_that_waits(folder):
    with scorer(folder, "hangs", timeout=60, workers=1) as s, s.begin() as scoring:
        scoring.add(0, rollouts("hang"))
        s.close()
        with pytest.raises(ValueError, match="the reward workers are closed"):
            scoring.finish()


def test_a_pool_that_is_closed_says_so():
    pool = WorkerPool(1)
    pool.close()
    with pytest.raises(ValueError, match="closed"):
        pool.submit(Call(Target("module", "function")))


def test_a_call_of_a_slow_independent_function_takes_a_quarter_of_its_deadline():
    function = Function("mine", Target("mine.py", "mine"), 1.0, {}, timeout=8.0, lane="", declared_independent=True)
    function.signature = {"completions_per_call": None, "is_coroutine": False}
    group = [Rollout(Prompt(0, (1,), ""), (1,), (0.0,), "stop", 0, "")] * 10
    for pace, sizes in ((0.0, [10]), (0.5, [4, 4, 2]), (9.0, [1] * 10)):
        function.pace = pace
        assert [len(part) for part in function.parts(group)] == sizes
