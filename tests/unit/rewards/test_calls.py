"""What a call of a reward function holds, whole groups in retries too, and what a failed call costs."""

import os
from pathlib import Path

import pytest

from megagrpo.commands.api.inputs.call_inputs import collect
from megagrpo.config import RewardsSection
from megagrpo.config.basics.yaml_text import parse_yaml
from megagrpo.rewards.scorer import RewardScorer
from megagrpo.types import Prompt, Rollout
from tests.unit.rewards.reward_services import serving

CALLS = """
import asyncio, collections, itertools, os, signal, sys, time


def seen(completions, name):
    with open(f"{os.path.dirname(__file__)}/{name}", "a") as file:
        file.write("".join(completions) + "\\n")

def ranked(completions):
    return [float(sorted(completions).index(c)) for c in completions]

def places(completions):
    return [10.0 * len(completions) + i for i in range(len(completions))]

class Places:
    def __call__(self, completions, **columns):
        return places(completions)

async def places_later(completions):
    await asyncio.sleep(0.01)
    return places(completions)

def mutates(completions, prompts, answer, weights):
    rewards = [float(len(weights)) for _ in completions]
    for values in (completions, prompts, answer, weights):
        values.clear()
    return rewards

def one_for_all(completions):
    seen(completions, "one_for_all")
    return [1.0]

async def one_later(completions):
    seen(completions, "one_later")
    return [1.0]

def drops_first(completions):
    return [1.0] * (len(completions) - 1)

def too_many(completions):
    return (1.0 for _ in range(len(completions) + 1))

def endless(completions):
    return itertools.repeat(1.0)

def column(completions):
    import numpy
    return numpy.ones((len(completions), 1))

def row(completions):
    import numpy
    return numpy.ones((1, len(completions)))

def scalar(completions):
    return 1.0

def one_number_of_numpy(completions):
    import numpy
    return numpy.float32(1.0)

def nothing(completions):
    pass

def a_counter(completions):
    return collections.Counter(completions)

def a_set(completions):
    return set(map(float, range(len(completions))))

async def a_generator(completions):
    yield 1.0

async def forgets_to_await(completions):
    return places_later(completions)

def raises(completions):
    seen(completions, "raises")
    if "x" in completions:
        raise ValueError("an x")
    return ranked(completions)

async def raises_later(completions):
    seen(completions, "raises_later")
    return raises_quietly(completions)

def raises_quietly(completions):
    if "x" in completions:
        raise BaseException("an x")
    return ranked(completions)

class Independent:
    independent = True
    def __call__(self, completions):
        return raises_quietly(completions)

async def independent_later(completions):
    return raises_quietly(completions)
independent_later.independent = True

def once(completions):
    if "x" in completions and not os.path.exists(f"{os.path.dirname(__file__)}/once"):
        seen(completions, "once")
        os._exit(3)
    return ranked(completions)

def recurses(completions):
    return recurses(completions) if "x" in completions else ranked(completions)

def exits(completions):
    if "x" in completions:
        sys.exit("an x")
    return ranked(completions)

def interrupts(completions):
    if "x" in completions:
        raise KeyboardInterrupt
    return ranked(completions)

def sleeps(completions):
    seen(completions, "sleeps")
    time.sleep(30 if "x" in completions else 0.5 * len(completions))
    return ranked(completions)

async def sleeps_later(completions):
    await asyncio.sleep(30 if "x" in completions else 0.5 * len(completions))
    return ranked(completions)

def leaves(completions):
    os.chdir("/")
    signal.signal(signal.SIGALRM, lambda *_: os._exit(4))
    signal.setitimer(signal.ITIMER_REAL, 3600)
    return [1.0] * len(completions)

def finds(completions):
    return [float(os.getcwd() != "/" and signal.getitimer(signal.ITIMER_REAL) == (0, 0))] * len(completions)

def lost(completions):
    return [1.0] * len(completions)
lost.value_of_failure = float("nan")

def deep(completions):
    value = []
    for _ in range(100_000):
        value = [value]
    return [value, *[1.0] * (len(completions) - 1)]
"""


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "mine.py").write_text(CALLS)
    return tmp_path


def scorer(folder, *functions, **section):
    listed = [f if isinstance(f, dict) else {"function": f} for f in functions]
    listed = [f | {"function": f"{folder}/mine.py:{f['function']}"} if ":" not in f["function"] else f for f in listed]
    return RewardScorer(RewardsSection.model_validate({"functions": listed, "workers": 1} | section), 100)


def groups(*texts):
    """One rollout per letter, and one group per text."""
    # the same row of the data set each time
    prompts = [Prompt(7, (1,), "Q", {"answer": i}, occurrence=i) for i in range(len(texts))]
    return [Rollout(p, (1,), (0.0,), "stop", 0, c) for p, text in zip(prompts, texts, strict=True) for c in text]


def values(scored, name):
    return [s.rewards[name] for s in scored]


def called(folder, name):
    return sorted((folder / name).read_text().split())


def test_a_call_has_one_whole_group_in_order_whatever_the_function_is(folder):
    functions = ["places", "places_later", "Places", {"function": "places", "own_worker": True, "name": "own"}]
    with scorer(folder, *functions) as s:
        scored = s.score(groups("abc", "d", "ef"))
        for name in s.names:
            assert values(scored, name) == [30.0, 31.0, 32.0, 10.0, 20.0, 21.0]


def test_a_function_may_change_its_arguments(folder):
    with scorer(folder, {"function": "mutates", "args": {"weights": [1, 2]}}, "places") as s:
        scored = s.score(groups("ab", "cd"))
        assert values(scored, "mutates") == [2.0] * 4 and values(scored, "places") == [20.0, 21.0] * 2


WRONG = {
    "one_for_all": "1 rewards for 3 completions; return a list, one number or None per completion, in their order",
    "one_later": "1 rewards for 3 completions",
    "drops_first": "2 rewards for 3 completions",
    "too_many": "more than 3 rewards for 3 completions",
    "endless": "more than 3 rewards for 3 completions",
    "column": "an array of shape (3, 1) for 3 completions; return a list, one number or None per completion, in their "
    "order: shape (3,)",
    "row": "an array of shape (1, 3) for 3 completions",
    "scalar": "a float for 3 completions",
    "one_number_of_numpy": "a float for 3 completions",
    "nothing": "None for 3 completions",
    "a_counter": "a Counter for 3 completions",
    "a_set": "a set for 3 completions",
    "a_generator": "a async_generator for 3 completions",
    "forgets_to_await": "a coroutine for 3 completions",
}


def test_a_wrong_number_of_rewards_is_one_error_of_the_call_and_said_once(folder, caplog):
    with scorer(folder, *WRONG) as s:
        scored, metrics = s.score(groups("abc", "def")), s.metrics()
    said = [record.getMessage() for record in caplog.records if "returned" in record.getMessage()]
    assert len(said) == len(WRONG)
    for name, message in WRONG.items():
        assert values(scored, name) == [0.0] * 6 and metrics[f"rewards/{name}/exceptions"] == 6
        (own,) = [text for text in said if text.startswith(f"reward `{name}` scored 0 for 3 completion(s)")]
        assert f"it returned {message}" in own
    assert called(folder, "one_for_all") == called(folder, "one_later") == ["abc", "def"]  # no second call


def test_a_failed_call_is_repeated_with_the_same_group_and_costs_this_group_only(folder, caplog):
    with scorer(folder, "raises", "raises_later", "recurses", "exits", "interrupts", "once") as s:
        scored, metrics = s.score(groups("dxc", "fe")), s.metrics()
    for name in ("raises", "raises_later", "recurses", "exits", "interrupts"):
        assert values(scored, name) == [0.0, 0.0, 0.0, 1.0, 0.0], name
        assert metrics[f"rewards/{name}/exceptions"] == 3
    assert values(scored, "once") == [1.0, 2.0, 0.0, 1.0, 0.0] and metrics["rewards/once/exceptions"] == 0
    assert called(folder, "raises") == called(folder, "raises_later") == ["dxc", "dxc", "fe"]
    (said,) = [record.getMessage() for record in caplog.records if "`raises` scored 0" in record.getMessage()]
    assert "ValueError: an x" in said and "`independent: true` repeats it one completion at a time" in said


def test_an_independent_function_loses_the_faulty_completion_only(folder, caplog):
    with scorer(folder, {"function": "raises", "independent": True}, "Independent", "independent_later") as s:
        scored, metrics = s.score(groups("dxc", "fe")), s.metrics()
    for name in s.names:
        assert values(scored, name) == [0.0, 0.0, 0.0, 1.0, 0.0] and metrics[f"rewards/{name}/exceptions"] == 1
    assert called(folder, "raises") == ["c", "d", "dxc", "fe", "x"] and "costs its group" not in caplog.text


def test_a_group_has_the_timeout_of_each_of_its_completions(folder, caplog):
    with scorer(folder, "sleeps", "sleeps_later", timeout=1.0) as s:
        scored, metrics = s.score(groups("bca", "xy")), s.metrics()
        for name in s.names:
            assert values(scored, name) == [1.0, 2.0, 0.0, 0.0, 0.0] and metrics[f"rewards/{name}/timeouts"] == 2
        # whole, though the function is known to be slow
        assert values(s.score(groups("bca")), "sleeps") == [1.0, 2.0, 0.0]
    assert called(folder, "sleeps") == ["bca", "bca", "xy"] and "no answer within 2 s" in caplog.text


def test_what_a_function_leaves_behind_does_not_reach_the_next(folder):
    with scorer(folder, "leaves", "finds") as s:
        s.score(groups("ab"))
        assert values(s.score(groups("ab")), "finds") == [1.0, 1.0] and os.getcwd() != "/"


def test_a_value_of_failure_that_is_no_reward_is_refused(folder):
    with pytest.raises(
        ValueError, match=r"`lost` cannot be loaded: .*value_of_failure is nan; it must be a finite number or None"
    ):
        scorer(folder, "lost")


def test_a_value_that_cannot_be_shown_costs_its_completion_only(folder, caplog):
    with scorer(folder, "deep") as s:
        assert values(s.score(groups("abc")), "deep") == [0.0, 1.0, 1.0]
    assert "it returned a list, [[[" in caplog.text


def test_functions_from_python_declare_independence_as_files_do(folder):
    def fails(completions):
        return [1.0 / (c != "x") for c in completions]

    def alone(completions):
        return [1.0 / (c != "x") for c in completions]

    alone.independent = True
    made = collect([fails, alone, {"function": fails, "independent": True, "name": "declared"}], None, None, None)
    (override,) = made.overrides(made.write(folder))
    functions = parse_yaml(override.partition("=")[2], "rewards.functions")
    with RewardScorer(RewardsSection.model_validate({"functions": functions, "workers": 1}), 100) as s:
        scored = s.score(groups("axb"))
    assert values(scored, "fails") == [0.0] * 3
    assert values(scored, "alone") == values(scored, "declared") == [1.0, 0.0, 1.0]


def test_a_reward_server_gets_whole_groups_unless_it_is_independent(caplog):
    def answer(body):
        texts = body["completions"] if "completions" in body else [text[1:] for text in body["input"]]
        if "x" in texts:
            return 400, {}
        if "y" in texts:
            return 200, {"rewards": [1.0]}
        if "input" in body:
            return 200, {"data": [{"index": i, "probs": [2.0]} for i, _ in enumerate(texts)]}
        return 200, {"rewards": [float(len(texts))] * len(texts)}

    with serving(answer) as server:
        functions = [{"function": f"{server.url}/{name}"} for name in ("group", "alone", "classify")]
        functions[1]["independent"] = True
        with scorer(None, *functions) as s:
            scored, metrics = s.score(groups("axb", "c" * 70, "yz")), s.metrics()
        asked = ["".join(body["completions"]) for body in server.asked if "completions" in body]
    assert values(scored, "group") == [None] * 3 + [70.0] * 70 + [None] * 2
    assert values(scored, "alone") == [1.0, None, 1.0] + [70.0] * 70 + [None] * 2
    assert values(scored, "classify")[:3] == [2.0, None, 2.0] and metrics["rewards/group/exceptions"] == 5
    assert sorted(asked) == sorted(["axb", "axb", "c" * 70, "yz", "axb", "a", "x", "b", "c" * 70, "yz"])
    assert 'wanted {"rewards": [2 numbers or nulls]}' in caplog.text
