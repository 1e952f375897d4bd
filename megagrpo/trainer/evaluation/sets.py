"""Held-out sets: their prompts, their sampling parameters, and the metrics of their responses."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import batched
from statistics import fmean
from typing import Any

from megagrpo.config import RunConfig, evaluation_sets
from megagrpo.data.prompts import PromptSource
from megagrpo.data.tokenizer import Tokenizer
from megagrpo.engine.protocol import derive_seed
from megagrpo.platform.process.hints import did_you_mean
from megagrpo.rewards.answers import extractor
from megagrpo.rewards.scorer import RewardScorer
from megagrpo.trainer.evaluation.estimators import majority_passes, pass_at_k, steps_to
from megagrpo.trainer.rollout.collector import rollout_metrics, sampling_params
from megagrpo.types import Prompt, SamplingParams, ScoredRollout, Truncation

Collect = Callable[[Sequence[Prompt], int, SamplingParams, int], tuple[list[ScoredRollout], dict[str, float]]]


@dataclass(frozen=True)
class HeldOut:
    """One held-out set. `name` is "" for `data.eval`; `function` is the reward that decides if a response passes."""

    name: str
    prompts: list[Prompt]
    columns: list[str]
    num_generations: int
    sampling: SamplingParams
    function: str
    pass_reward: float
    answer: Callable[[str], str | None] | None  # extracts the answer of a response; None: no maj@k
    warnings: list[str] = field(default_factory=list)  # of its prompts

    @property
    def key(self) -> str:
        """The set's key in the config."""
        return f"evaluation.sets.{self.name}" if self.name else "data.eval"


def load_sets(
    config: RunConfig, tokenizer: Tokenizer, tools: Sequence[dict[str, Any]] = (), reward_names: Sequence[str] = ()
) -> list[HeldOut]:
    """Load the config's held-out sets. `tools` are shown in their prompts; `reward_names` are multi_turn's rewards.

    Raises ValueError for a set that cannot be used, and for a pass_function that is not a reward.
    """
    evaluation = config.evaluation
    names = [*config.rewards.names, *reward_names]
    function = evaluation.pass_function or names[0]
    if function not in names:
        hint = did_you_mean(function, names)
        raise ValueError(
            f"evaluation.pass_function: no reward function `{function}`{hint}; name one of {', '.join(names)}"
        )
    scorers = dict(zip(names, (f.function for f in config.rewards.functions), strict=False))
    answer = extractor(evaluation.answer, scorers.get(function, ""))
    sets = []
    for name, section in evaluation_sets(config).items():
        overrides = {key: getattr(section, key) for key in ("prompt_column", "columns", "extract_hash_answer")}
        data, key = config.data.model_copy(update=overrides), f"evaluation.sets.{name}" if name else "data.eval"
        source = PromptSource(section, data, tokenizer, config.rollout.max_prompt_length, config.run.seed, key, tools)
        sampling = replace(
            sampling_params(config.rollout, tokenizer.eos_token_ids),
            temperature=section.temperature,
            max_tokens=section.max_completion_length,
            truncation=Truncation(section.top_p, section.top_k, section.min_p),
        )
        about = function, evaluation.pass_reward, answer, source.warnings
        sets.append(HeldOut(name, source.all(), source.columns, section.num_generations, sampling, *about))
    return sets


def check_columns(sets: Sequence[HeldOut], rewards: RewardScorer) -> None:
    """Raise ValueError when a reward function needs a column that a set does not have."""
    for held_out in sets:
        try:
            rewards.check_columns(held_out.columns)
        except ValueError as error:
            raise ValueError(f"{held_out.key}: {error}") from error


def evaluate(
    sets: Sequence[HeldOut],
    collect: Collect,
    seed: int,
    see: Callable[[HeldOut, list[ScoredRollout]], None] = lambda *_: None,
) -> dict[str, float]:
    """Generate and score responses to every set. Returns metrics, prefixed `NAME/`; `see` gets each set's responses.

    Each set has a fixed seed, so two evaluations differ only by the policy.
    """
    metrics: dict[str, float] = {}
    for held_out in sets:
        own_seed = derive_seed(seed, "evaluation", held_out.name)
        scored, counters = collect(held_out.prompts, held_out.num_generations, held_out.sampling, own_seed)
        see(held_out, scored)
        prefix = f"{held_out.name}/" if held_out.name else ""
        metrics |= {f"{prefix}{name}": value for name, value in (metrics_of(held_out, scored) | counters).items()}
    return metrics


def metrics_of(held_out: HeldOut, scored: Sequence[ScoredRollout]) -> dict[str, float]:
    """Return lengths, finish reasons, mean rewards, pass@k and maj@k of one set's responses (in prompt order).

    A response passes when `function` gives it `pass_reward` or more; a response that it cannot score does not pass.
    Prompts without any response that it can score are left out of pass@k and maj@k.
    """
    metrics = rollout_metrics(scored)
    if known := [s.reward for s in scored if not math.isnan(s.reward)]:
        metrics["reward"] = fmean(known)
    n = held_out.num_generations
    groups = [group for group in batched(scored, n) if any(s.rewards[held_out.function] is not None for s in group)]
    if not groups:
        return metrics
    passed = [[passes(s.rewards[held_out.function], held_out.pass_reward) for s in group] for group in groups]
    for k in steps_to(n):
        metrics[f"pass@{k}"] = fmean(pass_at_k(n, sum(of_prompt), k) for of_prompt in passed)
    if n > 1 and held_out.answer is not None:
        answers = [[held_out.answer(s.rollout.prompt.opened + s.rollout.text) for s in group] for group in groups]
        metrics[f"maj@{n}"] = fmean(majority_passes(a, p) for a, p in zip(answers, passed, strict=True))
    return metrics


def passes(reward: float | None, pass_reward: float) -> bool:
    return reward is not None and reward >= pass_reward
