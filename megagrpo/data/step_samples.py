"""The samples of a step: a table of facts of all samples, which every rank holds, and the rollouts that one replica
sampled, which only its leader holds."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import batched
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megagrpo.data.packing import PackingRules, SampleShapes
from megagrpo.data.sampling import sampling_row
from megagrpo.data.turn_facts import turn_facts_of
from megagrpo.train_types import TrainSample
from megagrpo.types import CAUSES, ENDINGS, Prompt, Rollout, ScoredRollout

# bits of the column `flags`
TRUNCATED = 1  # finish_reason is "length"
KNOWS_STOP = 2  # the run has stop strings
STOPPED = 4  # one of them ended the response
DIALOGUE = 8  # the response has turns
OF_DIALOGUE = ("tool_calls", "tool_failures", "tool_shortened", "retries")
FAILED_DIALOGUE = 16  # its conversation failed


@dataclass(frozen=True)
class Columns:
    """The columns of a table of facts. They grow when a rollout has something new, and then on every rank.

    `rewards` are the names of the reward functions, `logged` of the numbers that they logged, `counters` of a replica's
    counters. Columns of conversations, of responses with several weight versions, of votes, of rows' own sampling
    parameters and of trajectories with several samples exist only if needed.
    """

    rewards: tuple[str, ...] = ()
    logged: tuple[str, ...] = ()
    counters: tuple[str, ...] = ()
    dialogues: bool = False
    later_versions: bool = False
    votes: bool = False
    samplings: bool = False
    branches: bool = False

    @classmethod
    def of(cls, scored: Sequence[ScoredRollout], counters: Mapping[str, float] | None = None) -> Columns:
        """Return the columns that these rollouts of a replica, and its counters, need."""
        rollouts = [r for s in scored for r in (s.rollout, *s.rollout.branches)]
        return cls(
            rewards=tuple(dict.fromkeys(name for s in scored for name in s.rewards)),
            logged=tuple(dict.fromkeys(name for s in scored for name in s.logged)),
            counters=tuple(counters or {}),
            dialogues=any(r.dialogue is not None for r in rollouts),
            later_versions=any(r.later_versions for r in rollouts),
            samplings=any(s.rollout.prompt.distribution for s in scored),
            branches=len(rollouts) > len(scored),
        )

    def __or__(self, other: Columns) -> Columns:
        """Return the columns of both, those of `self` first."""
        pairs = zip(vars(self).items(), vars(other).values(), strict=True)
        both: dict[str, Any] = {
            name: tuple(dict.fromkeys((*one, *two))) if isinstance(one, tuple) else one or two
            for (name, one), two in pairs
        }
        return Columns(**both)

    @property
    def dtype(self) -> np.dtype[np.void]:
        """The row of a sample: 37 bytes with one reward function and nothing else."""
        row: list[Any] = [
            ("reward", "f8"),
            ("rewards", "f8", (len(self.rewards),)),  # NaN where a function could not score
            ("logged", "f8", (len(self.logged),)),  # NaN if the call logged no such number
            ("version", "i4"),  # weight version of the first token
            ("length", "i4"),  # tokens of prompt and response
            ("prompt_length", "i4"),  # with the tokens of others at the beginning of the response
            ("prompt_key", "i8"),
            ("flags", "u1"),
        ]
        if self.dialogues:
            row += [(name, "i4") for name in ("response", "written", "turns", *OF_DIALOGUE)]
            row += [("ended", "u1"), ("cause", "u1")]  # indices into ENDINGS and CAUSES
            row += [("seconds", "f4", (5,))]  # as in `Dialogue`
        if self.later_versions:
            row += [("later", "i4")]  # sum over the tokens of their weight version minus the first one's
        if self.votes:
            row += [("vote", "f8")]  # of a group, on each of its samples
        if self.samplings:
            row += [("sampling", "i4")]  # words of `sampling_row`
        if self.branches:
            row += [("branches", "i4")]  # samples of the trajectory after its first
        return np.dtype(row)


Vote = Callable[[Sequence[ScoredRollout]], float]  # a number of a group, from the texts of its responses


def votes_of(scored: Sequence[ScoredRollout], num_generations: int, vote: Vote | None) -> np.ndarray | None:
    """Return the vote of its group [n] for each of these rollouts of whole groups; None without `vote`."""
    if vote is None:
        return None
    return np.repeat([vote(group) for group in batched(scored, num_generations)], num_generations)


def facts_of(scored: Sequence[ScoredRollout], columns: Columns, votes: np.ndarray | None = None) -> np.ndarray:
    """Return the facts [n] of these rollouts, with `votes` [n] if the columns have them."""
    rows, rollouts = np.zeros(len(scored), columns.dtype), [s.rollout for s in scored]
    rows["reward"] = [s.reward for s in scored]
    if scored:
        rows["rewards"] = [[_number(s.rewards.get(name)) for name in columns.rewards] for s in scored]
        rows["logged"] = [[_number(s.logged.get(name)) for name in columns.logged] for s in scored]
    rows["version"] = [r.weight_version for r in rollouts]
    rows["length"] = [len(r.prompt.token_ids) + len(r.response_ids) for r in rollouts]
    rows["flags"] = [_flags(r) for r in rollouts]
    begins = [0 if r.dialogue is None else _first_written(r) for r in rollouts]
    rows["prompt_length"] = [len(r.prompt.token_ids) + begin for r, begin in zip(rollouts, begins, strict=True)]
    rows["prompt_key"] = prompt_keys(rollouts, begins)
    if columns.dialogues:
        rows["response"], rows["written"] = [len(r.response_ids) for r in rollouts], [r.length for r in rollouts]
        rows["turns"] = [0 if r.dialogue is None else len(r.dialogue.turns) for r in rollouts]
        for name in OF_DIALOGUE:
            rows[name] = [0 if r.dialogue is None else getattr(r.dialogue, name) for r in rollouts]
        rows["ended"] = [0 if r.dialogue is None else ENDINGS.index(r.dialogue.ended) for r in rollouts]
        rows["cause"] = [0 if r.dialogue is None else CAUSES.index(r.dialogue.cause) for r in rollouts]
        seconds = [(0.0,) * 5 if r.dialogue is None else r.dialogue.seconds for r in rollouts]
        rows["seconds"] = np.array(seconds).reshape(-1, 5)
    if columns.later_versions:
        rows["later"] = [(r.token_versions - r.weight_version).sum() if r.later_versions else 0 for r in rollouts]
    if votes is not None:
        rows["vote"] = votes
    if columns.samplings:
        rows["sampling"] = [sampling_row(r.prompt).size for r in rollouts]
    if columns.branches:
        rows["branches"] = [len(r.branches) for r in rollouts]
    return rows


def branch_facts_of(scored: Sequence[ScoredRollout], columns: Columns) -> np.ndarray:
    """Return the facts [m] of the further samples of these trajectories: lengths, prompts and versions of each, rewards
    and end of its trajectory."""
    own = [(s, branch) for s in scored for branch in s.rollout.branches]
    rows = facts_of([_branch(s, branch) for s, branch in own], columns)
    ends = TRUNCATED + KNOWS_STOP + STOPPED
    rows["flags"] = [_flags(branch) & ~ends | _flags(s.rollout) & ends for s, branch in own]
    return rows


def _branch(scored: ScoredRollout, branch: Rollout) -> ScoredRollout:
    """Return one of the further samples of a trajectory with the trajectory's rewards."""
    return replace(scored, rollout=branch)


def _flags(rollout: Rollout) -> int:
    dialogue = rollout.dialogue
    return (
        TRUNCATED * (rollout.finish_reason == "length")
        + KNOWS_STOP * (rollout.stop_string is not None)
        + STOPPED * bool(rollout.stop_string)
        + (0 if dialogue is None else DIALOGUE + FAILED_DIALOGUE * (dialogue.ended == "failed"))
    )


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _first_written(rollout: Rollout) -> int:
    """Return the index of the first token that the policy wrote; without one the number of tokens."""
    return int(rollout.written.argmax()) if rollout.length else len(rollout.response_ids)


def prompt_keys(rollouts: Sequence[Rollout], begins: Sequence[int]) -> list[int]:
    """Return a 63-bit key of each rollout, equal for equal tokens of the prompt and of the response before `begins`,
    and the same `inputs`."""
    keys: list[int] = []
    last: tuple[Prompt, int] | None = None
    for rollout, begin in zip(rollouts, begins, strict=True):
        prompt = rollout.prompt
        if last is None or begin or last[0] is not prompt or last[1]:  # a group's samples have one prompt
            contents = prompt.token_ids, tuple(rollout.response_ids[:begin].tolist())
            seen = repr((*contents, prompt.prompt_id if prompt.inputs else None))
            keys.append(int.from_bytes(hashlib.blake2b(seen.encode(), digest_size=8).digest(), "big") >> 1)
        else:
            keys.append(keys[-1])
        last = prompt, begin
    return keys


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
        rows = turn_facts_of([s.rollout for s in scored]) if turns else None
        return cls(prompts, facts, sampled_by, columns, own, branches, rows)

    def __len__(self) -> int:
        return len(self.prompts)

    def rewards(self, num_generations: int) -> Tensor:
        """Rewards [P, G] float64; NaN where no function could score."""
        return self._by_group("reward", num_generations)

    def rewards_by_function(self, num_generations: int) -> Tensor:
        """Rewards [P, G, F] float64 before their weights; NaN where a function could not score."""
        return self._by_group("rewards", num_generations)

    def _by_group(self, column: str, num_generations: int) -> Tensor:
        if len(self) % num_generations:
            raise ValueError(f"{len(self)} rollouts are not whole groups of {num_generations}")
        values = torch.from_numpy(np.ascontiguousarray(self.facts[column]))
        return values.view(-1, num_generations, *values.shape[1:])

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
            branches = [_branch(scored, branch) for branch in scored.rollout.branches]
            own |= enumerate(branches, int(firsts[index]))
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

    def largest_advantages(self, advantages: np.ndarray, of_turns: np.ndarray | None) -> np.ndarray:
        """Return [N + M]: the trajectory's advantage of each sample, from `advantages` [N]; the largest magnitude of
        its turns' advantages `of_turns` [K], if any. It is 0 only if the sample has no gradient."""
        spread = advantages[self.trajectories]
        if of_turns is not None:
            _, owners = self.turn_owners()
            spread[np.unique(owners)] = 0.0
            np.maximum.at(spread, owners, np.abs(of_turns))
        return spread

    def shapes(self, advantages: np.ndarray, rules: PackingRules, of_turns: np.ndarray | None = None) -> SampleShapes:
        """Return what packing must know of `every` sample, of trajectories with these advantages [N], and of turns with
        the advantages `of_turns` [K]."""
        every, trajectories = self.every, self.trajectories
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
        facts = np.concatenate([_widened(self.facts, other.facts.dtype), other.facts])
        own = {**self.own, **{len(self) + i: s for i, s in other.own.items()}}
        sampled_by, branches = np.concatenate([self.sampled_by, other.sampled_by]), other.branches
        if branches is not None:
            before = self.facts[:0] if self.branches is None else self.branches
            branches = np.concatenate([_widened(before, branches.dtype), branches])
        turns = None if self.turns is None or other.turns is None else np.concatenate([self.turns, other.turns])
        return StepSamples([*self.prompts, *other.prompts], facts, sampled_by, other.columns, own, branches, turns)


def _rows_of(table: np.ndarray, counts: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """Return the rows of these trajectories, in this order, of a table with `counts` [N] rows of each."""
    stops = counts.cumsum()
    rows = [np.arange(stops[i] - counts[i], stops[i]) for i in indices.tolist()]
    return table[np.concatenate([np.zeros(0, np.int64), *rows])]


def _widened(facts: np.ndarray, dtype: np.dtype[np.void]) -> np.ndarray:
    """Return the rows with more columns. New rewards and logged numbers are NaN, other columns 0."""
    rows = np.zeros(len(facts), dtype)
    for name in facts.dtype.names or ():
        if shape := facts.dtype[name].shape:
            rows[name] = math.nan
            rows[name][:, : shape[0]] = facts[name]
        else:
            rows[name] = facts[name]
    return rows
