"""Hostile completions against every built-in reward: each ends by its deadline, and the next completion gets its usual
score."""

import time

import pytest
from ranks import run_ranks

from megagrpo.config import RewardsSection
from megagrpo.rewards.registry.target import BUILT_IN_REWARDS
from megagrpo.rewards.scorer import RewardScorer
from megagrpo.types import Prompt, Rollout
from tests.unit.rewards.reward_services import make_model, says, serving

TIMEOUT = 1.0
SERVED_TIMEOUT = 8.0  # of functions that ask a server of this file, which a busy machine slows
MEGABYTE = 1 << 20
HOSTILE = {
    "a tower of powers": r"<answer>10^{10^{10}}</answer> \boxed{10^{10^{10}}}",
    "nested parentheses": r"\boxed{" + "(" * 300 + "1" + ")" * 300 + "}",
    "nested braces": r"\boxed{" + r"\frac{1}{" * 300 + "1" + "}" * 300 + "}",
    "a fork bomb": "```python\nimport os\nwhile True:\n    os.fork()\n```",
    "an endless loop": "```python\nwhile True:\n    pass\n```",
    "much output": "```python\nwhile True:\n    print('x' * 10**6)\n```",
    "a megabyte of words": "word " * (MEGABYTE // 5),
    "a megabyte of one letter": "x" * MEGABYTE,
    "a megabyte of digits": "9" * MEGABYTE,
    "a megabyte of groups of digits": "1" + ",111" * (MEGABYTE // 4) + "1",
    "a megabyte of open tags": "<answer><think><reasoning>" * (MEGABYTE // 26),
    "a megabyte of tags": "<think></think> <answer></answer> <reasoning></reasoning> " * (MEGABYTE // 58),
    "a megabyte of lines": "\n" * MEGABYTE,
    "a megabyte of boxes": r"\boxed{" * (MEGABYTE // 7),
    "lone surrogates": "\ud800<answer>\udfff</answer>\udc00" * 10,
    "zeros and controls": "\x00\x1b[2J\x7f" * 100,
    "nothing": "",
}
GOOD = r"<think>It is 3.</think><answer>3</answer> \boxed{3}"
ARGS = {"code_execution": {"seconds": 0.5}}
JUDGES = ("rubric", "pairwise")
VERDICT = {"criterion_1": '{"criterion_1": {"criteria_met": true}}', "better": '{"better": "tie"}'}


def verdict_of(body: dict) -> str | None:
    """The first name of the verdict that a request to a judge wants; None for a score in text."""
    form = body.get("response_format")
    return next(iter(form["json_schema"]["schema"]["properties"])) if form else None


@pytest.fixture(scope="module")
def services(tmp_path_factory):
    """The address of a server that acts as judge and as reward model server, and the folder of a reward model."""
    model = run_ranks(make_model, 1, tmp_path_factory.mktemp("hostile") / "tiny-rm")[0]
    with serving(
        lambda body: (
            says(VERDICT[verdict_of(body)]) if "messages" in body else (200, {"rewards": [0.5] * len(body["prompts"])})
        )
    ) as server:
        yield server.url, model


def columns_of(name: str) -> dict:
    metadata = {"source_dataset": "countdown", "target": 24, "numbers": [2, 3, 4]}
    columns = {"answer": "3", "solution": "3", "metadata": metadata, "question": "Q"}
    return columns | ({"expected_output": "3"} if name == "code_execution" else {})


SLOW_TO_LOAD = ("reasoning_gym", "model")  # every missed deadline costs seconds, because they load again
FEW = ("a tower of powers", "lone surrogates", "nothing", "a megabyte of digits")
LONG = (
    "cosine",
    "reasoning_accuracy",
    "reasoning_gym",
    "code_execution",
    "model",
)  # the first two compute accuracy again
NAMES = [
    pytest.param(name, marks=[pytest.mark.full] if name in LONG else [])
    for name in (*BUILT_IN_REWARDS, "model", "served")
]


@pytest.mark.parametrize("name", NAMES)
def test_a_hostile_completion_ends_by_its_deadline_and_the_run_goes_on(name, services):
    url, model = services
    function = {"model": f"model:{model}", "served": f"{url}/reward"}.get(name, name)
    at, verdicts = {"url": f"{url}/v1", "model": "m"}, {"explain": False, "max_chars": 10_000}
    of_judges = {"rubric": at | verdicts | {"criteria": ["a"]}, "pairwise": at | verdicts}
    args = (of_judges | {"model": {"max_length": 64}}).get(name, ARGS.get(name, {}))
    timeout = SERVED_TIMEOUT if name in (*JUDGES, "served") else TIMEOUT
    section = RewardsSection(functions=[{"function": function, "args": args, "name": "it"}], timeout=timeout, workers=2)
    with RewardScorer(section, 100) as scorer:
        ids = (1,) * 50
        texts = [text for kind, text in HOSTILE.items() if kind in FEW or name not in SLOW_TO_LOAD] + [GOOD]
        batch = [
            Rollout(Prompt(i, (1,), "Q", columns_of(name)), ids, (0.0,) * 50, "stop", 0, text)
            for i, text in enumerate(texts)
        ]
        begun = time.monotonic()
        scored = scorer.score(batch)
        calls = 2 * len(batch)  # all of them in one call, and then each alone
        assert time.monotonic() - begun < calls * (timeout + (10 if name in SLOW_TO_LOAD else 1))
        assert all(s.reward == s.reward or s.rewards["it"] is None for s in scored)
        alone = scorer.score(batch[-1:])[0].rewards["it"]
        assert (
            scored[-1].rewards["it"] == pytest.approx(alone, abs=1e-4) and scorer.metrics()["rewards/it/timeouts"] == 0
        )
