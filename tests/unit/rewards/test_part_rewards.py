"""Rewards per turn and per token, by functions in real workers: what they are told, and what a fault costs."""

import logging
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from megagrpo.config import RewardFunction, RewardsSection
from megagrpo.rewards.scorer import RewardScorer
from megagrpo.types import Dialogue, Prompt, Rollout, Turn

FUNCTIONS = '''
import math


def turns_of(trajectory):
    return [turn for sample in trajectory["samples"] for turn in sample["turns"]]


def calls(trajectories, **columns):
    """One for each call that did not fail; a turn without calls has no reward."""
    return [[len(t["calls"]) - t["failures"] if t["calls"] else None for t in turns_of(one)] for one in trajectories]


async def ids(trajectories, **columns):
    import torch

    return [torch.tensor([float(i) for t in turns_of(one) for i in t["token_ids"]]) for one in trajectories]


def sparse(trajectories, **columns):
    """A reward at the last token of each turn."""
    return [[r for t in turns_of(one) for r in [None] * (len(t["token_ids"]) - 1) + [1.0]] for one in trajectories]


def seen(trajectories, log_extra, **columns):
    log_extra("seen", [repr(one) for one in trajectories])
    return [0.0] * len(trajectories)


def everything(completions, log_extra, **columns):
    log_extra("names", [" ".join(sorted(columns)) for _ in completions])
    return [0.0] * len(completions)


def brevity(completion_ids, **columns):
    return [-float(len(ids)) for ids in completion_ids]


def faulty(trajectories, faults, **columns):
    counts = [len(turns_of(one)) for one in trajectories]
    given = {
        "right": lambda n: [1.0] * n,
        "short": lambda n: [1.0] * (n - 1),
        "long": lambda n: [1.0] * (n + 5),
        "endless": lambda n: iter(int, 1),
        "nan": lambda n: [1.0] * (n - 1) + [math.nan],
        "text": lambda n: [1.0] * (n - 1) + ["1"],
        "number": lambda n: 1.0,
        "word": lambda n: "1" * n,
        "nothing": lambda n: None,
        "unknown": lambda n: [None] * n,
        "huge": lambda n: [1e15] * n,
        "array": lambda n: __import__("numpy").ones(n),
    }
    return [given[faults[i % len(faults)]](n) for i, n in enumerate(counts)]


def lists(completions, **columns):
    return [[1.0, 2.0] for _ in completions]
'''

MESSAGES = (
    {"role": "assistant", "content": "ask"},
    {"role": "tool", "content": "9"},
    {"role": "assistant", "content": "9"},
)
PROMPT = Prompt(7, (1, 2), [{"role": "user", "content": "4 + 5?"}])


def conversation(rewards=(None, None), branches=(), **more):
    """Two turns of two tokens and one, with a tool's two tokens between them."""
    turns = (Turn(0, 2, rewards[0], calls=("add", "sub"), failures=1), Turn(4, 5, rewards[1]))
    known = [r for r in rewards if r is not None]
    given = {"turns": math.fsum(known) if known else None} if any(r is not None for r in rewards) else {}
    dialogue = Dialogue([True, True, False, False, True], MESSAGES, turns, "done", given)
    rollout = Rollout(PROMPT, [10, 11, 90, 91, 12], [-1.0] * 5, "stop", 0, "9", dialogue, branches=branches)
    return replace(rollout, **more)


BRANCH = replace(conversation(), response_ids=[20, 21, 90, 91, 22])
PLAIN = Rollout(replace(PROMPT, prompt_id=8), [30, 31, 32], [-1.0] * 3, "length", 0, "plain")


@pytest.fixture
def score(tmp_path):
    (tmp_path / "mine.py").write_text(FUNCTIONS)

    def score(rollouts, *functions, **options):
        section = RewardsSection(
            functions=[RewardFunction(**{"function": f"{tmp_path}/mine.py:{f.pop('name')}"} | f) for f in functions],
            workers=1,
            timeout=30,
        )
        with RewardScorer(section, 16, **options) as scorer:
            return scorer.score(rollouts), scorer.metrics()

    return score


def test_turns_get_the_weighted_sum_of_functions_and_scheduler(score):
    rollouts = [conversation((0.5, None)), conversation((None, 0.25)), conversation()]
    scored, metrics = score(rollouts, dict(name="calls", per="turn", weight=2.0), dict(name="brevity", weight=0.1))
    assert [s.turn_rewards for s in scored] == [(2.5, None), (2.0, 0.25), (2.0, None)]
    assert [s.parts.by_turn for s in scored] == [{"calls": (1.0, None)}] * 3
    assert [s.rewards["calls"] for s in scored] == [1.0] * 3, "a function's reward is the sum, before its weight"
    assert [s.reward for s in scored] == pytest.approx([2 + 0.5 - 0.3, 2 + 0.25 - 0.3, 2 - 0.3])
    assert [s.outcome for s in scored] == [s.reward for s in scored], "no token has a reward"
    assert (metrics["rewards/calls/mean"], metrics["rewards/calls/exceptions"]) == (1.0, 0.0)


def test_tokens_get_the_weighted_sum_of_functions(score):
    sparse, ids = dict(name="sparse", per="token", weight=4.0), dict(name="ids", per="token", weight=0.5)
    scored, _ = score([conversation(), PLAIN], sparse, ids, dict(name="brevity"))
    (tokens,), (plain,) = (s.parts.tokens for s in scored)
    assert tokens.tolist()[:2] == [5.0, 9.5] and math.isnan(tokens[2]) and math.isnan(tokens[3]) and tokens[4] == 10.0
    assert plain.tolist() == [15.0, 15.5, 20.0], "a response without a conversation is one turn"
    assert [s.outcome for s in scored] == [-3.0, -3.0]
    assert [s.reward for s in scored] == [5.0 + 9.5 + 10.0 - 3.0, 50.5 - 3.0]
    (alone,), _ = score([conversation()], dict(name="sparse", per="token"))
    known = alone.parts.tokens[0]
    assert [i for i, value in enumerate(known.tolist()) if not math.isnan(value)] == [1, 4]
    assert math.isnan(alone.outcome) and alone.reward == 2.0, "all of the reward is in tokens"


def test_each_sample_of_a_trajectory_has_the_rewards_of_its_own_tokens(score):
    rollout = conversation(branches=(BRANCH, PLAIN))
    functions = dict(name="ids", per="token"), dict(name="calls", per="turn")
    (scored,), _ = score([rollout], *functions)
    main, branch, plain = scored.parts.tokens
    assert [main[0], main[1], main[4]] == [10.0, 11.0, 12.0]
    assert [branch[0], branch[1], branch[4]] == [20.0, 21.0, 22.0]
    assert plain.tolist() == [30.0, 31.0, 32.0]
    assert scored.turn_rewards == (1.0, None, None, 1.0, None), "the branches' turns, then the rollout's"
    assert scored.rewards["ids"] == sum(range(10, 13)) + sum(range(20, 23)) + sum(range(30, 33))
    assert [b.parts.tokens[0].tolist()[-1] for b in scored.branches] == [22.0, 32.0]
    assert [b.rollout for b in scored.branches] == [BRANCH, PLAIN]


def test_a_function_sees_the_conversation(score):
    failed = replace(conversation().dialogue, ended="failed", cause="timeout", retries=2)
    (scored, plain), _ = score([conversation(branches=(BRANCH,), dialogue=failed), PLAIN], dict(name="seen"))
    seen, alone = eval(scored.extra["seen/seen"]), eval(plain.extra["seen/seen"])
    assert (seen["ended"], seen["cause"], seen["retries"]) == ("failed", "timeout", 2)
    first, last = seen["samples"]
    assert first["context"] == PROMPT.messages and first["messages"] == [*MESSAGES]
    assert [turn["token_ids"] for turn in (*first["turns"], *last["turns"])] == [[20, 21], [22], [10, 11], [12]]
    assert (last["turns"][0]["calls"], last["turns"][0]["failures"]) == (["add", "sub"], 1)
    assert last["turns"][0].keys() == {"token_ids", "calls", "failures", "shortened", "finish_reason", "reward"}
    assert alone["ended"] == "length" and alone["samples"][0]["turns"][0]["token_ids"] == [30, 31, 32]
    assert alone["samples"][0]["messages"] == [{"role": "assistant", "content": "plain"}]


def test_a_function_with_any_argument_gets_trajectories_by_name_only(score):
    (scored,), _ = score([PLAIN], dict(name="everything"))
    names = scored.extra["everything/names"].split()
    assert "completion_ids" in names and "trajectories" not in names, "its tokens are not made a second time"


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("short", "it returned 1 rewards, but completion 1 of the call has 2 turns; return a number or None for each"),
        ("long", "it returned 7 rewards, but completion 1 of the call has 2 turns"),
        ("endless", "it returned more than 2 rewards, but completion 1 of the call has 2 turns"),
        ("nan", "it returned nan, which is not finite, for turn 1; completion 1 of the call has 2 turns"),
        ("text", "it returned a str, '1'; a reward is a number or None, for turn 1; completion 1"),
        ("number", "it returned a float, 1.0, but completion 1 of the call has 2 turns"),
        ("word", "it returned a str, '11', but completion 1 of the call has 2 turns"),
        ("huge", "beyond ±1e+15"),
    ],
)
def test_a_fault_costs_its_completion_and_is_named(score, caplog, fault, message):
    function = dict(name="faulty", per="turn", args=dict(faults=["right", fault, "array"]))
    with caplog.at_level(logging.WARNING):
        scored, metrics = score([conversation((None, 0.5)) for _ in range(3)], function)
    assert [s.rewards["faulty"] for s in scored] == [2.0, 0.0, 2.0]
    assert [s.turn_rewards for s in scored] == [(1.0, 1.5), (None, 0.5), (1.0, 1.5)]
    assert metrics["rewards/faulty/exceptions"] == 1
    assert "`faulty` scored 0 for 1 completion(s) of prompt 7" in caplog.text and message in caplog.text


@pytest.mark.parametrize("nothing", ["nothing", "unknown"])
def test_a_completion_without_any_reward_cannot_be_scored(score, nothing):
    function = dict(name="faulty", per="turn", args=dict(faults=[nothing, "right"]))
    scored, metrics = score([conversation(), conversation()], function, dict(name="brevity"))
    assert [s.rewards["faulty"] for s in scored] == [None, 2.0] and [s.reward for s in scored] == [-3.0, -1.0]
    assert (metrics["rewards/faulty/unscorable"], metrics["rewards/faulty/exceptions"]) == (1, 0)


def test_a_list_for_a_completion_needs_the_key(score, caplog):
    with caplog.at_level(logging.WARNING):
        (scored,), _ = score([conversation()], dict(name="lists"))
    assert scored.rewards["lists"] == 0.0
    assert "it returned a list, [1.0, 2.0]; a reward must be a number or None" in caplog.text
    assert "set `per: turn` or `per: token` beside `function`" in caplog.text


def test_the_function_of_the_page_rewards_turns_with_calls(tmp_path):
    page = (Path(__file__).parents[3] / "docs/credit.md").read_text()
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "each_turn" in block]
    (tmp_path / "my_rewards.py").write_text(code)
    function = RewardFunction(function=f"{tmp_path}/my_rewards.py:each_turn", per="turn")
    with RewardScorer(RewardsSection(functions=[function], workers=1), 16) as scorer:
        (scored,) = scorer.score([conversation()])
    assert scored.parts.by_turn == {"each_turn": (0.0, None)}, "one of the first turn's calls failed"


def test_built_in_functions_reward_completions_only():
    section = RewardsSection(functions=[RewardFunction(function="accuracy", per="turn")])
    with pytest.raises(ValueError, match=r"rewards.functions\[0\].per: turn only applies to a function of your own"):
        RewardScorer(section, 16)
