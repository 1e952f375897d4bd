"""The rollouts that a step trains on: drawn prompts, with dynamic sampling that replaces groups without a learning
signal."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import batched
from statistics import fmean

from megagrpo.algorithms.advantages import flat_groups
from megagrpo.config import RunConfig
from megagrpo.data.prompts import PromptSource
from megagrpo.engine.protocol import derive_seed
from megagrpo.trainer.rollout.collector import Collector
from megagrpo.types import SamplingParams, ScoredRollout


def draw_rollouts(
    collector: Collector,
    prompts: PromptSource,
    config: RunConfig,
    sampling: SamplingParams,
    step: int,
    say: Callable[[str], None],
) -> tuple[list[ScoredRollout], dict[str, float]]:
    """Return scored rollouts for the step after `step` steps, in whole groups, and the counters. Collective.

    With `algorithm.dynamic_sample`, groups whose rewards are all equal are replaced (DAPO, Yu et al. 2025, section 3.2;
    ms-swift's rounds). Fresh prompts are drawn until `prompts_per_step` groups differ in reward, for at most
    `max_resample_times` rounds. `dynamic_sample_fallback` decides about groups that are still missing. Every rank has
    all rollouts, so all ranks make the same decisions.
    """
    wanted, group = config.rollout.prompts_per_step, config.rollout.num_generations
    ask_ahead(collector, prompts, config, sampling, step, 1 + config.rollout.max_staleness)
    drawn: list[ScoredRollout] = []
    counters: dict[str, float] = defaultdict(float)

    def collect(count: int, *of_round: int) -> None:
        seed = derive_seed(config.run.seed, step, *of_round)
        scored, counted = collector.collect(prompts.next(count), group, sampling, seed)
        drawn.extend(scored)
        for name, value in counted.items():
            counters[name] += value

    collect(wanted)
    rounds, useful = 0, useful_groups(drawn, config)
    while config.algorithm.dynamic_sample and len(useful) < wanted and rounds < config.algorithm.max_resample_times:
        rounds += 1
        collect(redraw_size(wanted, len(useful), len(drawn) // group), rounds)
        useful = useful_groups(drawn, config)
    counters |= prompts.learn(pass_rates(drawn, config.data.curriculum_pass_reward))
    ask_ahead(collector, prompts, config, sampling, step + 1, config.rollout.max_staleness)
    if not config.algorithm.dynamic_sample:
        return drawn, dict(counters)
    counters |= {"dynamic_sample/rounds": float(rounds), "dynamic_sample/groups_drawn": float(len(drawn) // group)}
    counters |= {"dynamic_sample/groups_kept": float(min(len(useful), wanted))}
    if known := [s.reward for s in drawn if not math.isnan(s.reward)]:
        counters["dynamic_sample/reward_drawn"] = fmean(known)
    chosen = useful[:wanted]
    if len(useful) < wanted:
        partial = config.algorithm.dynamic_sample_fallback == "partial" and useful
        say(
            f"warning: step {step + 1}: {len(useful)} of {wanted} groups differ in reward after {rounds} rounds of "
            f"dynamic sampling; "
            f"training on {'these' if partial else 'the first groups drawn'} (algorithm.dynamic_sample_fallback)"
        )
        if not partial:
            chosen = groups_of(drawn, group)[:wanted]
    return [rollout for members in chosen for rollout in members], dict(counters)


def ask_ahead(
    collector: Collector, prompts: PromptSource, config: RunConfig, sampling: SamplingParams, step: int, steps: int
) -> None:
    """Request generation for the `steps` steps after `step` steps, up to the end of the run. Does nothing without
    asynchronous generation.

    Seeds are the same as in a synchronous run when every step draws the same number of prompts (no
    `algorithm.dynamic_sample`).
    """
    if not config.rollout.max_staleness or collector.pool is None:
        return
    wanted = config.rollout.prompts_per_step
    for i, coming in enumerate(batched(prompts.peek(wanted * min(steps, config.run.num_steps - step)), wanted)):
        of_step = ("ahead", coming[0].place) if config.algorithm.dynamic_sample else (step + i,)
        collector.ask(
            coming, config.rollout.num_generations, sampling, derive_seed(config.run.seed, *of_step), step + i
        )


def groups_of(scored: Sequence[ScoredRollout], group: int) -> list[tuple[ScoredRollout, ...]]:
    """Split rollouts into the groups of each prompt, in the order of drawing."""
    return list(batched(scored, group))


def useful_groups(scored: Sequence[ScoredRollout], config: RunConfig) -> list[tuple[ScoredRollout, ...]]:
    """Return the groups whose rewards differ, in the order of drawing."""
    groups = groups_of(scored, config.rollout.num_generations)
    by_function = config.algorithm.multi_objective_aggregation != "sum_then_normalize"
    return [
        members
        for members, flat in zip(groups, flat_groups(scored, config.rollout.num_generations, by_function), strict=True)
        if not flat
    ]


def redraw_size(wanted: int, useful: int, drawn: int) -> int:
    """Number of prompts for the next round: enough to fill the step at the current share of useful groups, and at most
    a whole step's."""
    return min(wanted, math.ceil((wanted - useful) * drawn / useful)) if useful else wanted


def pass_rates(scored: Sequence[ScoredRollout], pass_reward: float) -> dict[int, float]:
    """Return prompt_id -> share of its responses whose reward is at least `pass_reward`. Repeated draws of a prompt are
    pooled."""
    passed: dict[int, list[bool]] = defaultdict(list)
    for rollout in scored:
        passed[rollout.rollout.prompt.prompt_id].append(rollout.reward >= pass_reward)
    return {prompt_id: fmean(of_prompt) for prompt_id, of_prompt in passed.items()}
