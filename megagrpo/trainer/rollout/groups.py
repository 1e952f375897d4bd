"""The rollouts a step trains on: drawn prompts. Dynamic sampling replaces groups without a learning signal."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import batched
from statistics import fmean

import numpy as np
from torch import Tensor

from megagrpo.algorithms.advantages import flat_groups
from megagrpo.config import ConfigError, RunConfig
from megagrpo.data.packing.step_samples import StepSamples
from megagrpo.data.sources.prompt_order import PromptOrder
from megagrpo.engine.http.protocol import derive_seed
from megagrpo.records.rows.kept_rollouts import KeptFiles
from megagrpo.train_types import TrainState
from megagrpo.trainer.rollout.collector import Collector, NoRollouts
from megagrpo.trainer.rollout.image_checks import decodable
from megagrpo.trainer.rollout.sample_metrics import pass_rates, staleness
from megagrpo.trainer.rollout.sourced_prompts import SourcedPrompts
from megagrpo.types import Prompt, SamplingParams

OUTCOME = "outcome"  # `algorithm.dynamic_sample`: all rewards but penalties decide


@dataclass
class Rollouts:
    """Draws the rollouts of each step. All methods are collective."""

    config: RunConfig
    prompts: PromptOrder
    collector: Collector
    sampling: SamplingParams
    state: TrainState
    say: Callable[[str], None]
    sources: Mapping[str, SourcedPrompts] = field(default_factory=dict)  # of tasks with `data.source`, by name
    keeps: KeptFiles | None = None  # on leaders, with `run.keep_rollouts_gb`
    _decodable: set[int] = field(default_factory=set, init=False)  # rows whose images were decoded

    def draw(self) -> tuple[StepSamples, dict[str, float]]:
        """Return the samples of the next step, in whole groups, with counters and the age of the weights that sampled
        them. Raises StopRequested or NoRollouts.

        With `algorithm.dynamic_sample`, groups whose rewards are all equal are replaced (DAPO, Yu et al. 2025, section
        3.2; ms-swift's rounds). Fresh prompts are drawn until `prompts_per_step` groups differ in reward, for at most
        `max_resample_times` rounds. `dynamic_sample_fallback` decides about groups that are still missing. Every rank
        has the facts of all samples, so all ranks make the same decisions.
        """
        algorithm, rollout, step = self.config.algorithm, self.config.rollout, self.state.step
        wanted, group = rollout.prompts_per_step, rollout.num_generations
        self._ask_ahead(step, 1 + rollout.max_staleness)
        counters: dict[str, float] = defaultdict(float)

        def collect(count: int, *of_round: int) -> StepSamples:
            seed = derive_seed(self.config.run.seed, step, *of_round)
            self._leave_out_damaged(count)
            samples, counted = self.collector.collect(self.prompts.next(count), group, self.sampling, seed)
            for name, value in counted.items():
                counters[name] += value
            if self.keeps is not None:
                self.keeps.keep(step + 1, seed, [*samples.own.values()])
            return samples

        drawn, rounds = collect(wanted), 0
        useful = self._useful_groups(drawn)
        while algorithm.dynamic_sample and len(useful) < wanted and rounds < algorithm.max_resample_times:
            rounds += 1
            drawn += collect(redraw_size(wanted, len(useful), len(drawn.group_sizes(group))), rounds)
            useful = self._useful_groups(drawn)
        for name, source in self.sources.items():
            if len(own := self._of_task(drawn, name)):
                told = source.tell(own, self.config.group_sizes[name])
                counters |= {f"tasks/{name}/{metric}" if name else metric: value for metric, value in told.items()}
        counters |= self.prompts.learn(pass_rates(drawn, self.config.data.curriculum_pass_reward))
        if rollout.scheduling == "longest_first":
            self.prompts.response_lengths.learn([p.prompt_id for p in drawn.prompts], drawn.written.tolist())
        self._ask_ahead(step + 1, rollout.max_staleness)
        samples = drawn
        if algorithm.dynamic_sample:
            counters |= {"dynamic_sample/rounds": float(rounds)}
            samples = self._useful(drawn, useful, rounds, counters)
        if rollout.max_staleness and self.config.generates:
            ages = staleness(samples, self.state.weight_version)
            assert 0 <= ages["staleness/max"] <= rollout.max_staleness, ages
            counters |= ages
        return samples, dict(counters)

    def advance(self) -> None:
        """Count the step that was trained on the last draw as finished."""
        self.state.step += 1
        self.prompts.store(self.state)
        self.collector.step = self.state.step

    def _useful_groups(self, drawn: StepSamples) -> np.ndarray:
        """Return the indices of the groups that dynamic sampling keeps: the source's choice, or rewards that differ."""
        choosing = {name: source for name, source in self.sources.items() if source.keeps}
        of_tasks = drawn.groups_of_tasks(self.config.rollout.num_generations)
        if of_tasks.keys() <= choosing.keys():
            useful = np.zeros(0, np.int64)
        else:
            useful = self._differing_groups(drawn)
        for name, source in choosing.items():
            if name in of_tasks:
                kept = source.kept(self._of_task(drawn, name), self.config.group_sizes[name])
                own = of_tasks[name].numpy()
                useful = np.union1d(np.setdiff1d(useful, own), own[kept])
        return useful

    def _of_task(self, drawn: StepSamples, name: str) -> StepSamples:
        """Return the samples of a task."""
        return drawn.select(np.flatnonzero([prompt.task == name for prompt in drawn.prompts])) if name else drawn

    def _differing_groups(self, drawn: StepSamples) -> np.ndarray:
        """Return the indices of the groups whose rewards differ."""
        algorithm, group = self.config.algorithm, self.config.rollout.num_generations
        rewards = drawn.rewards(group)
        if isinstance(algorithm.dynamic_sample, str):
            deciding = self._deciding(algorithm.dynamic_sample, drawn.columns.rewards)
            rewards = drawn.rewards_by_function(group)[..., deciding]
        elif algorithm.multi_objective_aggregation != "sum_then_normalize" or drawn.columns.roles:
            rewards = drawn.rewards_by_function(group)
        return useful_groups(rewards)

    def _deciding(self, choice: str, names: Sequence[str]) -> list[int]:
        """Return the indices of the functions that `algorithm.dynamic_sample` names. Raises ConfigError for none."""
        penalties = self.config.all_rewards.penalties
        chosen = [i for i, name in enumerate(names) if name == choice or (choice == OUTCOME and name not in penalties)]
        if not chosen:
            has = "only penalties" if choice == OUTCOME else f"no `{choice}`"
            raise ConfigError(f"algorithm.dynamic_sample: {has} in the rewards {', '.join(names)}; name one of them")
        return chosen

    def _useful(self, drawn: StepSamples, useful: np.ndarray, rounds: int, counters: dict[str, float]) -> StepSamples:
        """Return the samples of a step with dynamic sampling: the useful groups, or the fallback. Adds counters."""
        wanted, group = self.config.rollout.prompts_per_step, self.config.rollout.num_generations
        groups = drawn.groups(group)
        counters["dynamic_sample/groups_drawn"] = float(groups[-1] + 1)
        counters["dynamic_sample/groups_kept"] = float(min(len(useful), wanted))
        rewards = drawn.facts["reward"]
        if known := rewards[~np.isnan(rewards)].tolist():
            counters["dynamic_sample/reward_drawn"] = fmean(known)
        chosen = useful[:wanted]
        if len(useful) < wanted:
            partial = self.config.algorithm.dynamic_sample_fallback == "partial" and len(useful)
            self.say(
                f"warning: step {self.state.step + 1}: {len(useful)} of {wanted} groups differ in reward after "
                f"{rounds} rounds of dynamic sampling; training on {'these' if partial else 'the first groups drawn'} "
                "(algorithm.dynamic_sample_fallback)"
            )
            if not partial:
                chosen = np.arange(wanted)
        return drawn.select(np.flatnonzero(np.isin(groups, chosen)))

    def _leave_out_damaged(self, n: int) -> None:
        """Leave out rows with damaged images among the next `n` prompts, so that the rows after them are drawn instead.
        Raises NoRollouts if bad rows are refused. The rows of a data source were checked when it returned them."""
        if not self.config.data.images:
            return
        prompts, say = self.prompts, self.say
        while fresh := {p.prompt_id: p for p in self._unchecked(n)}:
            good = decodable([*fresh.values()], prompts.origin, self.collector.layout, say)
            self._decodable |= {prompt.prompt_id for prompt in good}
            try:
                prompts.leave_out(fresh.keys() - self._decodable)
            except ValueError as error:
                raise NoRollouts(str(error)) from error

    def _unchecked(self, n: int) -> list[Prompt]:
        """Return those of the next `n` prompts whose images were not decoded yet."""
        own = self.prompts.peek(n) if "" not in self.sources else ()
        return [p for p in own if p.task not in self.sources and p.prompt_id not in self._decodable]

    def _ask_ahead(self, step: int, steps: int) -> None:
        """Request generation for `steps` steps after `step` steps, up to the run's end, if generation is asynchronous.

        Seeds are the same as in a synchronous run when every step draws the same number of prompts (no
        `algorithm.dynamic_sample`).
        """
        rollout, run = self.config.rollout, self.config.run
        if not rollout.max_staleness:
            return
        wanted = rollout.prompts_per_step
        count = wanted * min(steps, run.num_steps - step)
        self._leave_out_damaged(count)
        if self.collector.pool is None:
            return
        for i, coming in enumerate(batched(self.prompts.peek(count), wanted)):
            of_step = ("ahead", coming[0].position) if self.config.algorithm.dynamic_sample else (step + i,)
            seed = derive_seed(run.seed, *of_step)
            self.collector.ask(coming, rollout.num_generations, self.sampling, seed, step + i)


def useful_groups(rewards: Tensor) -> np.ndarray:
    """Return the indices of the groups whose rewards [P, G] differ, or whose rewards [P, G, F] of any function do."""
    return np.flatnonzero(~flat_groups(rewards).numpy())


def redraw_size(wanted: int, useful: int, drawn: int) -> int:
    """Number of prompts for the next round: enough to fill the step at the current useful share, at most a step's."""
    return min(wanted, math.ceil((wanted - useful) * drawn / useful)) if useful else wanted
