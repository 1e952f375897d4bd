"""Defines the section `rewards`: the functions that score responses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from megagrpo.config.basics.problems import Problem
from megagrpo.config.sections.section import Count, PositiveInt, Seconds, Section

if TYPE_CHECKING:
    from megagrpo.config import RunConfig

JUDGED = ("rubric", "pairwise")  # they may ask the run's own servers
JUDGE_TASK = 2048  # tokens of a judge's instructions and criteria
PENALTIES = ("soft_overlong", "repetition", "token_repetition")
LOADED_MODEL, SERVER = "model:", ("http://", "https://")  # beginnings of `function`


class RewardFunction(Section):
    function: str
    """A built-in function of docs/rewards.md such as `accuracy`; your own as `package.module:function` or
    `path/file.py:function`; a reward model as `model:PATH`; or a reward server as `http://...`."""
    name: Annotated[str, Field(pattern=r"^[\w.-]+$")] | None = None
    """Name in metrics and completions.jsonl; the last part of `function` when empty."""
    weight: float = 1.0
    """Weight in the sum of rewards."""
    args: dict[str, Any] = {}
    """Keyword arguments passed on every call; for a class, to its constructor."""
    per: Literal["trajectory", "turn", "token"] = "trajectory"
    """What a function of your own rewards. trajectory: it returns a number per completion. turn or token: a list of
    numbers per completion, one for each turn of the policy, or for each token that the policy wrote. Their sum is the
    function's reward; `algorithm.advantage_by` says what else they decide. docs/credit.md."""
    independent: bool = False
    """Each completion is scored on its own: a failed call is repeated per completion, and only the faulty one fails.
    Built-in functions and reward models are independent; others may have the attribute `independent = True`."""
    timeout: Seconds | None = None
    """Timeout in seconds for scoring one completion; `rewards.timeout` when empty."""
    own_worker: bool = False
    """Run the function in a separate process, for functions that load a model. Reward models always do."""

    @property
    def own_judge(self) -> str | None:
        """The judge among the run's own servers that the function asks, if any."""
        return self.args.get("judge") if self.function in JUDGED else None

    @property
    def short_name(self) -> str:
        """The name, else the text after the colon of `function`, else the last part of a model's path or URL."""
        if self.name:
            return self.name
        if self.function.startswith((LOADED_MODEL, *SERVER)):
            path = self.function.split("?")[0].removeprefix(LOADED_MODEL).rstrip("/")
            return path.rpartition("/")[2].replace(":", "_")
        return self.function.rpartition(":")[2]


class RewardsSection(Section):
    functions: list[RewardFunction] = []
    """Reward functions; their weighted sum is the reward. `[]` if a `multi_turn` scheduler or environment gives it."""
    timeout: Seconds = 10.0
    """Timeout in seconds for scoring one completion; a group of n completions gets n times as long. Then the worker is
    killed; the group scores 0 and counts as n timeouts. With `independent` only the late completion does."""
    workers: Count = 2
    """Worker processes per rank that scores."""
    concurrency: PositiveInt = 16
    """Concurrent calls of async functions (LLM judge, reward servers, your own), per rank that scores."""

    @property
    def names(self) -> list[str]:
        """A short unique name for each function."""
        return numbered(function.short_name for function in self.functions)

    @property
    def own_judges(self) -> set[str]:
        """The judges among the run's own servers: policy, reference."""
        return {str(f.own_judge) for f in self.functions if f.own_judge}

    def judge_length(self, response: int) -> int:
        """Return the most tokens of a request to an own judge and its verdict, besides the prompt's. `response` is the
        limit of a response."""
        lengths = [0]
        for f in self.functions:
            if f.own_judge:
                shown = min(response, int(f.args.get("max_chars", response)))
                verdict = int(f.args.get("max_tokens", 1024))
                lengths.append(JUDGE_TASK + verdict + shown * (2 if f.function == "pairwise" else 1))
        return max(lengths)

    @property
    def penalties(self) -> set[str]:
        """The names of built-in functions that lower the rewards of long or repetitive responses."""
        pairs = zip(self.names, self.functions, strict=True)
        return {name for name, function in pairs if function.function in PENALTIES}


def numbered(stems: Iterable[str]) -> list[str]:
    """Return the names in order; repeated names get a number (`length`, `length_2`)."""
    names: list[str] = []
    for stem in stems:
        name, count = stem, 1
        while name in names:
            count += 1
            name = f"{stem}_{count}"
        names.append(name)
    return names


def judge_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield judges that the run's servers cannot be."""
    judges, key = config.all_rewards.own_judges, "rewards.functions"
    if "reference" in judges and (not config.lora.syncs_adapters or config.model.reference_path):
        reason = "args.judge: reference needs the reference's weights below an adapter (lora.rank, lora.sync: adapter)"
        fix = "serve the reference with `vllm serve` and name it in args.url"
        yield Problem(
            (key, "lora.rank", "lora.sync", "model.reference_path"), f"{reason}, without reference_path; {fix}"
        )
