"""`log_extra` and `log_metric` of reward functions, through real worker processes."""

import json
import math

import pytest
import torch

from megagrpo.config import RewardsSection
from megagrpo.data.packing.step_samples import StepSamples
from megagrpo.records.rows.completions import table
from megagrpo.rewards.registry.reward_values import MOST_NAMES, CallLog, is_logged
from megagrpo.rewards.registry.target import Target
from megagrpo.rewards.scorer import RewardScorer
from megagrpo.rewards.workers.pool import Call, _is_result_of
from megagrpo.trainer.rollout.sample_metrics import rollout_metrics
from megagrpo.types import Prompt, Rollout
from tests.unit.for_each import for_each
from tests.unit.records.completion_rows import completion_rows

FUNCTIONS = """
import re

def exact(completions, answer, log_extra, log_metric, **columns):
    found = [re.findall(r"-?\\d+", text)[-1:] for text in completions]
    log_extra("found", [numbers[0] if numbers else None for numbers in found])
    log_metric("share with a number", sum(map(bool, found)) / len(found))
    log_metric("size", len(completions))
    return [float(numbers == [right]) for numbers, right in zip(found, answer)]

async def waits(completions, log_extra=None, log_metric=None):
    log_extra("found", [len(text) for text in completions])
    log_metric("twice", 1)
    log_metric("twice", 4)
    return [1.0] * len(completions)

def wrong(completions, **kwargs):
    kwargs["log_extra"]("short", [1])
    kwargs["log_extra"]("objects", [object()] * len(completions))
    kwargs["log_metric"]("mean", 0.5)
    kwargs["log_metric"]("text", "high")
    kwargs["log_extra"]("right", completions)
    return [2.0] * len(completions)

def fails(completions, log_extra, log_metric):
    log_extra("seen", completions)
    log_metric("calls", len(completions))
    if "bad" in completions:
        raise ValueError
    return [1.0] * len(completions)
fails.independent = True

class Keeps:
    def __call__(self, completions, log_metric):
        log_metric("state", 3)
        return [0.0] * len(completions)
"""


@pytest.fixture
def score(tmp_path):
    """Scores two groups of three completions with the named functions."""
    (tmp_path / "mine.py").write_text(FUNCTIONS)

    def scored(*names: str, texts=("a 7", "b", "7", "c 1 8", "9", "8"), **more):
        functions = [{"function": f"{tmp_path}/mine.py:{name}"} for name in names]
        rollouts = [
            Rollout(Prompt(i // 3, (1,), "?", {"answer": "78"[i // 3]}), (5,), (-0.1,), "stop", 0, text)
            for i, text in enumerate(texts)
        ]
        with RewardScorer(RewardsSection(functions=functions, workers=2, **more), 16) as scorer:
            return scorer.score(rollouts)

    return scored


def test_columns_and_numbers_travel_with_the_rewards_and_are_means_over_the_responses(score):
    found = score("exact", "waits")
    assert [s.rewards["exact"] for s in found] == [1, 0, 1, 1, 0, 1]
    assert [s.extra["exact/found"] for s in found] == ["7", None, "7", "8", "9", "8"]
    assert [s.extra["waits/found"] for s in found] == [3, 1, 1, 5, 1, 1]
    metrics = rollout_metrics(StepSamples.of(found))
    assert metrics["rewards/exact/share with a number"] == pytest.approx(5 / 6)  # the same however the batch is divided
    assert metrics["rewards/waits/twice"] == 2.5 and 1 <= metrics["rewards/exact/size"] <= 6
    rows = completion_rows(1, found, [0.0] * 6)
    assert rows[0]["extra"] == {"exact/found": "7", "waits/found": 3}
    columns, cells = table(rows)
    assert columns[3:7] == ["rewards/exact", "rewards/waits", "exact/found", "waits/found"] and cells[1][3:7] == [
        0,
        1,
        None,
        1,
    ]


def test_an_object_of_a_class_logs_too(score):
    assert [s.logged for s in score("Keeps", texts=("a", "b", "c"))] == [{"Keeps/state": 3.0}] * 3


def test_a_wrong_use_is_reported_once_with_its_name_and_changes_no_reward(score, caplog):
    found = score("wrong", "exact")
    assert [s.rewards["wrong"] for s in found] == [2.0] * 6
    assert [list(s.extra) for s in found] == [["wrong/right", "exact/found"]] * 6
    assert not any(name.startswith("wrong/") for s in found for name in s.logged)
    said = sorted(record.getMessage() for record in caplog.records)
    assert [text.partition(":")[0] for text in said] == ["reward `wrong`"] * 4
    for expected in (
        "log_extra('short'): 1 values for 3 completions",
        "log_extra('objects'): a value is a object",
        "log_metric('mean'): every reward function has a metric of this name",
        "log_metric('text'): the value is a str, 'high'",
    ):
        assert sum(expected in text and "Its rewards count" in text for text in said) == 1, said


def test_what_a_failed_call_logged_is_dropped_and_its_retries_count(score):
    found = score("fails", texts=("a", "bad", "c"))
    assert [s.rewards["fails"] for s in found] == [1, 0, 1]
    assert [s.extra.get("fails/seen") for s in found] == ["a", None, "c"]
    assert [s.logged.get("fails/calls") for s in found] == [1, None, 1]


def test_values_become_json():
    log = CallLog(6)
    log.log_extra("x", [None, True, 7, 0.5, math.inf, "a"])
    log.log_extra("t", torch.arange(6))
    log.log_extra("s", [torch.tensor(1.5), 2**70, "\ud800", False, -1, ""])
    log.log_metric("m", torch.tensor(2))
    contents = log.contents()
    assert contents == {
        "columns": {
            "x": [None, True, 7, 0.5, None, "a"],
            "t": [0, 1, 2, 3, 4, 5],
            "s": [1.5, float(2**70), "\ud800", False, -1, ""],
        },
        "metrics": {"m": 2.0},
        "problems": [],
    }
    assert is_logged(json.loads(json.dumps(contents)), 6)


@for_each(
    ("function", "name", "value", "said"),
    [
        ("log_extra", "x", "ab", "the values are a str; give a list"),
        ("log_extra", "x", 5, "the values are a int; give a list"),
        ("log_extra", "x", [1, [2]], "a value is a list, [2]"),
        ("log_extra", 3, [1, 2], "the name is a int; give text"),
        ("log_extra", "", [1, 2], "the name must have 1 to 100 printable characters"),
        ("log_extra", "a\nb", [1, 2], "the name must have 1 to 100 printable characters"),
        ("log_metric", "n" * 101, 1, "the name must have 1 to 100 printable characters"),
        ("log_metric", "n", math.nan, "the value is nan, which is not finite"),
        ("log_metric", "n", -2e15, "the value is -2e+15; it must lie within ±1e+15"),
        ("log_metric", "n", 10**400, "the value is inf, which is not finite"),
        ("log_metric", "timeouts", 1, "every reward function has a metric of this name"),
    ],
)
def test_a_wrong_name_or_value_is_a_problem(function, name, value, said):
    log = CallLog(2)
    getattr(log, function)(name, value)
    (problem,) = log.contents()["problems"]
    assert problem.startswith(f"{function}(") and said in problem
    assert not log.contents()["columns"] and not log.contents()["metrics"]


def test_a_name_per_completion_is_limited():
    log = CallLog(1)
    for i in range(2 * MOST_NAMES):
        log.log_metric(f"of prompt {i}", i)
    assert len(log.contents()["metrics"]) == MOST_NAMES == len(log.contents()["problems"])


@pytest.mark.parametrize(
    "change",
    [
        {"columns": {"x": [1]}},
        {"columns": {"x": [1, []]}},
        {"columns": []},
        {"metrics": {"m": "1"}},
        {"problems": [1]},
        {"problems": None},
    ],
)
def test_a_log_that_a_worker_forged_is_refused(change):
    valid = {"columns": {"x": [1, None]}, "metrics": {"m": 1.0}, "problems": ["text"]}
    assert is_logged(valid, 2) and not is_logged(valid | change, 2) and not is_logged([], 2)
    call = Call(Target("module", "function"), arguments={"completions": ["a", "b"]})
    assert _is_result_of(call, [[1.0, None], valid]) and not _is_result_of(call, [[1.0, None], valid | change])
    assert not _is_result_of(call, [1.0, None]) and not _is_result_of(call, [[1.0], valid])
