"""Held-out sets: their prompts, their sampling parameters, and the metrics of their responses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import comb
from statistics import fmean

import numpy as np

from megagrpo.config import DataSection, DatasetSection, Task, evaluation_sets
from megagrpo.data.packing.sample_table import Vote
from megagrpo.data.packing.step_samples import StepSamples
from megagrpo.data.sources.bad_rows import BadRows
from megagrpo.data.sources.prompt_order import Origin, PromptOrder
from megagrpo.engine.http.protocol import derive_seed
from megagrpo.environments.dialogues import Dialogues
from megagrpo.platform.parallel.layout import Layout
from megagrpo.rewards.math.answers import extractor
from megagrpo.rewards.scorer import RewardScorer
from megagrpo.suggestions import did_you_mean
from megagrpo.trainer.rollout.collector import NoRollouts
from megagrpo.trainer.rollout.image_checks import decodable
from megagrpo.trainer.rollout.sample_metrics import rollout_metrics
from megagrpo.types import Prompt, SamplingParams, ScoredRollout, Truncation

Read = Callable[[DatasetSection, DataSection, str], PromptOrder]  # reads the data set of a config key
Collect = Callable[[Sequence[Prompt], int, SamplingParams, int, Vote | None], tuple[StepSamples, dict[str, float]]]


@dataclass(frozen=True)
class HeldOut:
    """One held-out set. `name` is "" for `data.eval`, the task's for that of a task; `function` is the reward that
    decides if a response passes."""

    name: str
    key: str  # the set's key in the config
    prompts: list[Prompt]
    columns: list[str]
    num_generations: int
    sampling: SamplingParams
    function: str
    pass_reward: float
    answer: Callable[[str], str | None] | None  # extracts the answer of a response; None: no maj@k
    warnings: list[str] = field(default_factory=list)  # of its prompts
    bad: BadRows = field(default_factory=BadRows)

    def origin(self, prompt_id: int) -> Origin:
        """Return the set's key, the row of a prompt, and the set's bad rows."""
        return self.key, prompt_id, self.bad

    @property
    def vote(self) -> Vote | None:
        """The vote of a group: 1 if its most frequent answer passes, else 0. None without maj@k."""
        return self._majority if self.num_generations > 1 and self.answer is not None else None

    def _majority(self, group: Sequence[ScoredRollout]) -> float:
        assert self.answer is not None, "`vote` is None without an extractor of answers"
        answers = [self.answer(s.rollout.prompt.opened + s.rollout.text) for s in group]
        return float(majority_passes(answers, [passes(s.rewards[self.function], self.pass_reward) for s in group]))


def load_sets(task: Task, trained: SamplingParams, read: Read, reward_names: Sequence[str] = ()) -> list[HeldOut]:
    """Load the held-out sets of a task with `read`. `trained` are the sampling parameters of the run, `reward_names`
    multi_turn's rewards.

    Raises ValueError for a set that cannot be used, and for a pass_function that is not a reward.
    """
    config, evaluation = task.config, task.config.evaluation
    names = [*config.rewards.names, *reward_names]
    function = evaluation.pass_function or next(iter(names), "")  # a run with teachers may have no rewards
    if function not in names and function:
        hint = did_you_mean(function, names)
        raise ValueError(
            f"evaluation.pass_function: no reward function `{function}`{hint}; name one of {', '.join(names)}"
        )
    scorers = dict(zip(names, (f.function for f in config.rewards.functions), strict=False))
    answer = extractor(evaluation.answer, scorers.get(function, ""))
    sets = []
    for name, section in evaluation_sets(config).items():
        overrides = {key: getattr(section, key) for key in ("prompt_column", "columns", "extract_hash_answer")}
        data = config.data.model_copy(update=overrides)
        key = f"evaluation.sets.{name}" if name else task.key("data.eval")
        source = read(section, data, key)
        sampling = replace(
            trained,
            temperature=section.temperature,
            max_tokens=section.max_completion_length,
            truncation=Truncation(section.top_p, section.top_k),
        )
        about = task.named(function), evaluation.pass_reward, answer, source.warnings, source.bad
        prompts = [replace(prompt, task=task.name) for prompt in source.all()]
        sets.append(HeldOut(task.named(name), key, prompts, source.columns, section.num_generations, sampling, *about))
    return sets


def decodable_sets(sets: Sequence[HeldOut], layout: Layout | None, say: Callable[[str], None]) -> list[HeldOut]:
    """Return the sets with the prompts whose images can be decoded. Raises NoRollouts if bad rows are refused, and for
    a set without such prompts. Collective, unless `layout` is None."""
    found = [replace(of, prompts=decodable(of.prompts, of.origin, layout, say)) for of in sets]
    if empty := next((held_out.key for held_out in found if not held_out.prompts), None):
        raise NoRollouts(f"{empty}: no row is usable; correct the rows")
    return found


def check_columns(sets: Sequence[HeldOut], scorer: RewardScorer, dialogues: Dialogues | None, task: str = "") -> None:
    """Raise ValueError when a reward function or an agent of a task needs a column that one of its sets does not
    have."""
    for held_out in sets:
        try:
            scorer.check_columns(held_out.columns, task)
            if dialogues:
                dialogues.check_columns(held_out.columns)
        except ValueError as error:
            raise ValueError(f"{held_out.key}: {error}") from error


def evaluate(
    sets: Sequence[HeldOut], collect: Collect, seed: int, see: Callable[[HeldOut, StepSamples], None] = lambda *_: None
) -> dict[str, float]:
    """Generate and score responses to every set. Returns metrics, prefixed `NAME/`; `see` gets each set's samples.

    Each set has a fixed seed, so two evaluations differ only by the policy.
    """
    metrics: dict[str, float] = {}
    for held_out in sets:
        own_seed = derive_seed(seed, "evaluation", held_out.name)
        asked = held_out.prompts, held_out.num_generations, held_out.sampling, own_seed
        samples, counters = collect(*asked, held_out.vote)
        see(held_out, samples)
        prefix = f"{held_out.name}/" if held_out.name else ""
        metrics |= {f"{prefix}{name}": value for name, value in (metrics_of(held_out, samples) | counters).items()}
    return metrics


def metrics_of(held_out: HeldOut, samples: StepSamples) -> dict[str, float]:
    """Return lengths, finish reasons, mean rewards, pass@k and maj@k of one set's responses (in prompt order).

    A response passes when `function` gives it `pass_reward` or more; a response that it cannot score does not pass.
    Prompts without any response that it can score are left out of pass@k and maj@k.
    """
    metrics, rewards = rollout_metrics(samples), samples.facts["reward"]
    if known := rewards[~np.isnan(rewards)].tolist():
        metrics["reward"] = fmean(known)
    n = held_out.num_generations
    scores = samples.facts["rewards"][:, samples.columns.rewards.index(held_out.function)].reshape(-1, n)
    groups = ~np.isnan(scores).all(1)  # those that count
    if not groups.any():
        return metrics
    passed = (scores[groups] >= held_out.pass_reward).sum(1).tolist()
    for k in steps_to(n):
        metrics[f"pass@{k}"] = fmean(pass_at_k(n, of_prompt, k) for of_prompt in passed)
    if samples.columns.votes:
        metrics[f"maj@{n}"] = fmean(samples.facts["vote"].reshape(-1, n)[groups, 0].tolist())
    return metrics


def passes(reward: float | None, pass_reward: float) -> bool:
    return reward is not None and reward >= pass_reward


def pass_at_k(n: int, passed: int, k: int) -> float:
    """Return the probability that at least one of k responses passes, when k are drawn from n of which `passed` pass.

    The formula is 1 - C(n - passed, k) / C(n, k), an unbiased estimate for k fresh responses (Chen et al. 2021, arXiv
    2107.03374, eq. 1). Raises ValueError unless 1 <= k <= n and 0 <= passed <= n.
    """
    if not 1 <= k <= n or not 0 <= passed <= n:
        raise ValueError(f"pass@{k} of {n} responses of which {passed} pass: k must be from 1 to {n}")
    return 1 - comb(n - passed, k) / comb(n, k)


def majority_passes(answers: Sequence[str | None], passed: Sequence[bool]) -> bool:
    """Whether the most frequent answer passes (Wang et al. 2022, arXiv 2203.11171).

    A response without an answer does not vote. With equal votes the answer that came first wins. The winner passes when
    the first response with that answer passes.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return False
    (winner, _), *_ = votes.most_common(1)
    return passed[list(answers).index(winner)]


def steps_to(n: int) -> list[int]:
    """Return the values of k for pass@k: 1, 2, 4, ... below n, and n."""
    return [*(2**i for i in range(n.bit_length()) if 2**i < n), n]
