"""What a step trains on: the rollouts of freshly drawn prompts, with those of groups that teach nothing replaced when that is asked for."""

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
from megagrpo.rollout.collector import Collector
from megagrpo.types import SamplingParams, ScoredRollout


def draw_rollouts(
    collector: Collector, prompts: PromptSource, config: RunConfig, sampling: SamplingParams, step: int, say: Callable[[str], None]
) -> tuple[list[ScoredRollout], dict[str, float]]:
    """Scored rollouts for the step after `step` steps, in whole groups, and what was counted on the way. Collective.

    With `algorithm.dynamic_sample` groups whose rewards are all equal are replaced (DAPO, Yu et al. 2025, section 3.2; ms-swift's rounds):
    fresh prompts are drawn until `prompts_per_step` groups differ in reward, `max_resample_times` rounds at most. What is still missing
    then is filled as `dynamic_sample_fallback` says. Every rank sees all rollouts, so all decide alike.
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
            f"warning: step {step + 1}: {len(useful)} of {wanted} groups differ in reward after {rounds} rounds of dynamic sampling; "
            f"training on {'these' if partial else 'the first that were drawn'} (algorithm.dynamic_sample_fallback)"
        )
        if not partial:
            chosen = groups_of(drawn, group)[:wanted]
    return [rollout for members in chosen for rollout in members], dict(counters)


def ask_ahead(collector: Collector, prompts: PromptSource, config: RunConfig, sampling: SamplingParams, step: int, steps: int) -> None:
    """Have generation begin for the `steps` steps after `step` steps, as far as the run goes; nothing where it does not run ahead.

    Seeds are those of a run that does not, where every step draws the same number of prompts.
    """
    if not config.rollout.max_staleness or collector.pool is None:
        return
    wanted = config.rollout.prompts_per_step
    for i, coming in enumerate(batched(prompts.peek(wanted * min(steps, config.run.max_steps - step)), wanted)):
        of_step = ("ahead", coming[0].place) if config.algorithm.dynamic_sample else (step + i,)
        collector.ask(coming, config.rollout.num_generations, sampling, derive_seed(config.run.seed, *of_step), step + i)


def groups_of(scored: Sequence[ScoredRollout], group: int) -> list[tuple[ScoredRollout, ...]]:
    """The rollouts of each prompt, in the order of drawing."""
    return list(batched(scored, group))


def useful_groups(scored: Sequence[ScoredRollout], config: RunConfig) -> list[tuple[ScoredRollout, ...]]:
    """The groups whose rewards differ, in the order of drawing."""
    groups = groups_of(scored, config.rollout.num_generations)
    return [members for members, flat in zip(groups, flat_groups(scored, config), strict=True) if not flat]


def redraw_size(wanted: int, useful: int, drawn: int) -> int:
    """Prompts for the next round: as many as fill the step if groups stay as often useful as so far; a whole step's at most."""
    return min(wanted, math.ceil((wanted - useful) * drawn / useful)) if useful else wanted


def pass_rates(scored: Sequence[ScoredRollout], pass_reward: float) -> dict[int, float]:
    """Share of each prompt's responses whose reward is at least `pass_reward`, by prompt_id. A prompt that was drawn twice counts once."""
    passed: dict[int, list[bool]] = defaultdict(list)
    for rollout in scored:
        passed[rollout.rollout.prompt.prompt_id].append(rollout.reward >= pass_reward)
    return {prompt_id: fmean(of_prompt) for prompt_id, of_prompt in passed.items()}
