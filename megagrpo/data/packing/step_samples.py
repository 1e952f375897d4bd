"""The samples of a step: a table of facts of all samples, which every rank holds, and the rollouts that one replica
sampled, which only its leader holds."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from megagrpo.data.packing.sample_packing import PackingRules, SampleShapes
from megagrpo.data.packing.sample_table import TRUNCATED, Columns, branch_facts_of, facts_of, widened
from megagrpo.data.packing.turn_table import turn_facts_of
from megagrpo.train_types import TrainSample
from megagrpo.types import Prompt, ScoredRollout


@dataclass(frozen=True, eq=False)
class StepSamples:
    """The N trajectories of a step, in prompt order, a group's trajectories next to each other. A trajectory is one
    sample, unless its rollout has `branches`: the M further samples of the step follow in `branches`.

    What decides about all samples (advantages, packing, metrics) reads `facts` and the numbers of `prompts`, which are
    the same on every rank; only leaders have the contents of prompts. Tokens, log-probs, texts and columns are in
    `own`: on the leader of the replica that sampled them.

    >>> samples = StepSamples.of([])
    >>> len(samples), samples.facts.dtype.itemsize
    (0, 29)
    """

    prompts: Sequence[Prompt]  # [N] as drawn
    facts: np.ndarray  # [N] rows of `columns.dtype`
    sampled_by: np.ndarray  # [N] int64, `dp_rank` of the replica that sampled each one
    columns: Columns = field(default_factory=Columns)
    own: Mapping[int, ScoredRollout] = field(default_factory=dict)  # by index; empty on ranks that are no leader
    # [M] rows of `columns.dtype`, by trajectory; None: each trajectory has one sample
    branches: np.ndarray | None = None
    turns: np.ndarray | None = None  # [K] rows of `TURN`, by trajectory; None: the advantages do not need them

    @classmethod
    def of(
        cls,
        scored: Sequence[ScoredRollout],
        sampled_by: np.ndarray | None = None,
        replica: int | None = 0,
        votes: np.ndarray | None = None,
        turns: bool = False,
    ) -> StepSamples:
        """Return the samples of rollouts that are all at hand. `own` are those that `replica` sampled; None: none."""
        columns = replace(Columns.of(scored), votes=votes is not None)
        sampled_by = np.zeros(len(scored), np.int64) if sampled_by is None else sampled_by
        own = {i: s for i, (s, by) in enumerate(zip(scored, sampled_by.tolist(), strict=True)) if by == replica}
        branches = branch_facts_of(scored, columns) if columns.branches else None
        prompts, facts = [s.rollout.prompt for s in scored], facts_of(scored, columns, votes)
        rows = turn_facts_of(scored) if turns else None
        return cls(prompts, facts, sampled_by, columns, own, branches, rows)

    def __len__(self) -> int:
        return len(self.prompts)

    def group_sizes(self, num_generations: int) -> np.ndarray:
        """Return [P] int64: the trajectories of each group, `num_generations` where its task does not set it."""
        sizes, stop = list[int](), 0
        while stop < len(self):
            sizes.append(self.prompts[stop].group_size(num_generations))
            stop += sizes[-1]
        if stop > len(self):
            raise ValueError(f"{len(self)} rollouts are not whole groups of {num_generations}")
        return np.array(sizes, np.int64)

    def groups(self, num_generations: int) -> np.ndarray:
        """Return [N] int64: the group of each trajectory."""
        sizes = self.group_sizes(num_generations)
        return np.repeat(np.arange(sizes.size), sizes)

    def in_groups(self, num_generations: int) -> Tensor:
        """Return [P, G] bool, with the largest group's G: False where a smaller group has no trajectory."""
        sizes = torch.from_numpy(self.group_sizes(num_generations))
        return torch.arange(int(sizes.max()) if len(sizes) else num_generations) < sizes[:, None]

    def by_group(self, values: np.ndarray | Tensor, num_generations: int, missing: float = math.nan) -> Tensor:
        """Return the table [P, G, ...] of `values` [N, ...]; `missing` where a group has no trajectory."""
        rows, inside = torch.as_tensor(np.array(values)), self.in_groups(num_generations)
        table = rows.new_full((*inside.shape, *rows.shape[1:]), missing)
        table[inside] = rows
        return table

    def rewards(self, num_generations: int) -> Tensor:
        """Rewards [P, G] float64; NaN where no function could score, and where a group has no trajectory."""
        return self.by_group(self.facts["reward"], num_generations)

    def outcomes(self, num_generations: int) -> Tensor:
        """Rewards [P, G] float64 without the rewards of tokens that have advantages; NaN where there is none."""
        name = "outcome" if self.columns.token_advantages else "reward"
        return self.by_group(self.facts[name], num_generations)

    def groups_of_tasks(self, num_generations: int) -> dict[str, Tensor]:
        """Return the indices of each task's groups, by the task's name; "" without tasks."""
        found = defaultdict[str, list[int]](list)
        firsts = self.group_sizes(num_generations).cumsum() - self.group_sizes(num_generations)
        for group, first in enumerate(firsts.tolist()):
            found[self.prompts[first].task].append(group)
        return {task: torch.tensor(groups) for task, groups in found.items()}

    def rewards_by_function(self, num_generations: int) -> Tensor:
        """Rewards [P, G, F] float64 before their weights; NaN where a function could not score."""
        return self.by_group(self.facts["rewards"], num_generations)

    def has(self, flag: int) -> np.ndarray:
        """[N] bool: whether each sample has this bit of `flags`."""
        return (self.facts["flags"] & flag) != 0

    @property
    def trajectories(self) -> np.ndarray:
        """[N + M] int64: the trajectory of each sample. The first N are the samples 0 of the trajectories."""
        first = np.arange(len(self))
        return first if self.branches is None else np.append(first, np.repeat(first, self.facts["branches"]))

    @cached_property
    def every(self) -> StepSamples:
        """All N + M samples of the step, each as a trajectory of its own: what packing and exchange count."""
        if self.branches is None:
            return self
        trajectories, own = self.trajectories, dict(self.own)
        facts = np.concatenate([self.facts, self.branches])
        facts["branches"] = 0
        firsts = len(self) + self.facts["branches"].cumsum() - self.facts["branches"]
        for index, scored in self.own.items():
            own |= enumerate(scored.branches, int(firsts[index]))
        prompts = [self.prompts[i] for i in trajectories.tolist()]
        return StepSamples(prompts, facts, self.sampled_by[trajectories], self.columns, own)

    def members(self, trajectories: np.ndarray) -> np.ndarray:
        """Return the indices in `every` of all samples of these trajectories. Samples with equal prompts are next to
        each other, so that they can share one copy."""
        if self.branches is None:
            return trajectories
        chosen = np.flatnonzero(np.isin(self.trajectories, trajectories))
        _, firsts, keys = np.unique(self.every.facts["prompt_key"][chosen], return_index=True, return_inverse=True)
        return chosen[np.argsort(firsts[keys], kind="stable")]

    def totals(self, of_samples: np.ndarray) -> np.ndarray:
        """Return the sum [N] int64 over the samples of each trajectory of a column [N + M] of `every`."""
        totals = np.bincount(self.trajectories, of_samples, len(self)) if self.branches is not None else of_samples
        return totals.astype(np.int64)

    @property
    def responses(self) -> np.ndarray:
        """[N] int64: tokens of each trajectory's responses."""
        facts, columns = self.every.facts, self.columns
        return self.totals(facts["response"] if columns.dialogues else facts["length"] - facts["prompt_length"])

    @property
    def written(self) -> np.ndarray:
        """[N] int64: tokens of each trajectory's responses that the policy wrote."""
        return self.totals(self.every.facts["written"]) if self.columns.dialogues else self.responses

    @property
    def turn_counts(self) -> np.ndarray:
        """[N] int64: turns of each trajectory."""
        every = self.every
        return self.totals(every.facts["turns"] if self.columns.dialogues else np.zeros(len(every), np.int64))

    def turn_owners(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the trajectory [K] and the index in `every` [K] of each row of `turns`."""
        assert self.turns is not None, "only algorithm.advantage_by keeps the turns"
        owners, numbers = np.repeat(np.arange(len(self)), self.turn_counts), self.turns["sample"].astype(np.int64)
        if self.branches is None:
            return owners, owners
        before = len(self) + self.facts["branches"].cumsum() - self.facts["branches"] - 1
        return owners, np.where(numbers == 0, owners, before[owners] + numbers)

    def with_turn_advantages(
        self, samples: Mapping[int, TrainSample], advantages: np.ndarray
    ) -> dict[int, TrainSample]:
        """Return the samples, by index in `every`, whose turns' tokens have the `advantages` [K] of `turns`."""
        assert self.turns is not None, "only algorithm.advantage_by keeps the turns"
        _, owners = self.turn_owners()
        order = np.argsort(owners, kind="stable")
        starts = np.searchsorted(owners[order], [*samples, *(i + 1 for i in samples)]).reshape(2, -1).T.tolist()
        responses, changed = self.every.responses, {}
        for (index, sample), (start, stop) in zip(samples.items(), starts, strict=True):
            row = torch.full((sample.token_ids.numel(),), sample.advantage, dtype=torch.float32)
            before = row.numel() - int(responses[index])
            for turn in order[start:stop].tolist():
                row[before + self.turns["start"][turn] : before + self.turns["stop"][turn]] = advantages[turn]
            changed[index] = replace(sample, token_advantages=row) if stop > start else sample
        return changed

    def with_token_advantages(
        self, samples: Mapping[int, TrainSample], advantages: np.ndarray
    ) -> dict[int, TrainSample]:
        """Return the samples, by index in `every`, whose `token_advantages` get the `advantages` [N] of their
        trajectories added."""
        owners, changed = self.trajectories, dict(samples)
        for index, sample in samples.items():
            if sample.token_advantages is not None:
                row = sample.token_advantages + float(advantages[owners[index]])
                changed[index] = replace(sample, token_advantages=row)
        return changed

    def largest_advantages(self, advantages: np.ndarray, of_turns: np.ndarray | None) -> np.ndarray:
        """Return [N + M]: the trajectory's advantage of each sample, from `advantages` [N], with roles [N + M]; the
        largest magnitude of its turns' advantages `of_turns` [K], or the largest of its tokens' advantages, if any. It
        is 0 only if the sample has no gradient."""
        spread = advantages if self.columns.roles else advantages[self.trajectories]
        if self.columns.token_advantages:
            facts = self.every.facts
            low, high = spread + facts["lowest"], spread + facts["highest"]
            spread = np.where(np.abs(low) > np.abs(high), low, high)
        if of_turns is not None:
            _, owners = self.turn_owners()
            spread[np.unique(owners)] = 0.0
            np.maximum.at(spread, owners, np.abs(of_turns))
        return spread

    def shapes(self, advantages: np.ndarray, rules: PackingRules, of_turns: np.ndarray | None = None) -> SampleShapes:
        """Return what packing must know of `every` sample, of trajectories with these advantages [N], with roles of
        samples with [N + M], and of turns with the advantages `of_turns` [K]. The samples of a role in a trajectory are
        a sequence of the loss, as those of a trajectory without roles."""
        every, trajectories = self.every, self.trajectories
        if self.columns.roles:
            trajectories = trajectories * (len(self.columns.roles) + 1) + every.facts["role"] + 1
        masked, facts = every.has(TRUNCATED) & rules.mask_truncated, every.facts
        lengths, prompts = (facts[name].astype(np.int64) for name in ("length", "prompt_length"))
        num_loss = np.where(masked, 0, every.written)
        largest = self.largest_advantages(advantages, of_turns)
        shapes = SampleShapes(lengths, prompts, facts["prompt_key"], num_loss, largest, masked)
        return shapes if self.branches is None else shapes.of_trajectories(trajectories)

    def select(self, indices: np.ndarray) -> StepSamples:
        """Return these trajectories, renumbered in this order."""
        own = {new: self.own[old] for new, old in enumerate(indices.tolist()) if old in self.own}
        prompts = [self.prompts[i] for i in indices.tolist()]
        branches = None if self.branches is None else _rows_of(self.branches, self.facts["branches"], indices)
        turns = None if self.turns is None else _rows_of(self.turns, self.turn_counts, indices)
        return StepSamples(prompts, self.facts[indices], self.sampled_by[indices], self.columns, own, branches, turns)

    def __add__(self, other: StepSamples) -> StepSamples:
        """Return these samples, then those of `other`, whose columns begin with the columns of these."""
        assert self.columns.dialogues == other.columns.dialogues, "a run has conversations in all of its steps or none"
        facts = np.concatenate([widened(self.facts, other.facts.dtype), other.facts])
        own = {**self.own, **{len(self) + i: s for i, s in other.own.items()}}
        sampled_by, branches = np.concatenate([self.sampled_by, other.sampled_by]), other.branches
        if branches is not None:
            before = self.facts[:0] if self.branches is None else self.branches
            branches = np.concatenate([widened(before, branches.dtype), branches])
        turns = None if self.turns is None or other.turns is None else np.concatenate([self.turns, other.turns])
        return StepSamples([*self.prompts, *other.prompts], facts, sampled_by, other.columns, own, branches, turns)


def _rows_of(table: np.ndarray, counts: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """Return the rows of these trajectories, in this order, of a table with `counts` [N] rows of each."""
    stops = counts.cumsum()
    rows = [np.arange(stops[i] - counts[i], stops[i]) for i in indices.tolist()]
    return table[np.concatenate([np.zeros(0, np.int64), *rows])]
