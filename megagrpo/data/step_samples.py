"""The samples of a step: a table of facts of all samples, which every rank holds, and the rollouts that one replica
sampled, which only its leader holds."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import batched
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megagrpo.data.packing import PackingRules, SampleShapes
from megagrpo.types import Prompt, Rollout, ScoredRollout

# bits of the column `flags`
TRUNCATED = 1  # finish_reason is "length"
KNOWS_STOP = 2  # the run has stop strings
STOPPED = 4  # one of them ended the response
DIALOGUE = 8  # the response has turns
FAILED_DIALOGUE = 16  # its conversation failed


@dataclass(frozen=True)
class Columns:
    """The columns of a table of facts. They grow when a rollout has something new, and then on every rank.

    `rewards` are the names of the reward functions, `logged` of the numbers that they logged, `counters` of a replica's
    counters. Columns of conversations, of responses with several weight versions and of votes exist only if needed.
    """

    rewards: tuple[str, ...] = ()
    logged: tuple[str, ...] = ()
    counters: tuple[str, ...] = ()
    dialogues: bool = False
    later_versions: bool = False
    votes: bool = False

    @classmethod
    def of(cls, scored: Sequence[ScoredRollout], counters: Mapping[str, float] | None = None) -> Columns:
        """Return the columns that these rollouts of a replica, and its counters, need."""
        return cls(
            rewards=tuple(dict.fromkeys(name for s in scored for name in s.rewards)),
            logged=tuple(dict.fromkeys(name for s in scored for name in s.logged)),
            counters=tuple(counters or {}),
            dialogues=any(s.rollout.dialogue is not None for s in scored),
            later_versions=any(s.rollout.later_versions for s in scored),
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
            row += [(name, "i4") for name in ("response", "written", "turns", "tool_calls", "tool_failures")]
        if self.later_versions:
            row += [("later", "i4")]  # sum over the tokens of their weight version minus the first one's
        if self.votes:
            row += [("vote", "f8")]  # of a group, on each of its samples
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
        for column, name in (("turns", "num_turns"), ("tool_calls", "tool_calls"), ("tool_failures", "tool_failures")):
            rows[column] = [0 if r.dialogue is None else getattr(r.dialogue, name) for r in rollouts]
    if columns.later_versions:
        rows["later"] = [(r.token_versions - r.weight_version).sum() if r.later_versions else 0 for r in rollouts]
    if votes is not None:
        rows["vote"] = votes
    return rows


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
    """The N samples of a step, in prompt order, a group's samples next to each other.

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

    @classmethod
    def of(
        cls,
        scored: Sequence[ScoredRollout],
        sampled_by: np.ndarray | None = None,
        replica: int | None = 0,
        votes: np.ndarray | None = None,
    ) -> StepSamples:
        """Return the samples of rollouts that are all at hand. `own` are those that `replica` sampled; None: none."""
        columns = replace(Columns.of(scored), votes=votes is not None)
        sampled_by = np.zeros(len(scored), np.int64) if sampled_by is None else sampled_by
        own = {i: s for i, (s, by) in enumerate(zip(scored, sampled_by.tolist(), strict=True)) if by == replica}
        return cls([s.rollout.prompt for s in scored], facts_of(scored, columns, votes), sampled_by, columns, own)

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
    def responses(self) -> np.ndarray:
        """[N] int64: tokens of each response."""
        if self.columns.dialogues:
            return self.facts["response"].astype(np.int64)
        return self.facts["length"].astype(np.int64) - self.facts["prompt_length"]

    @property
    def written(self) -> np.ndarray:
        """[N] int64: tokens of each response that the policy wrote."""
        return self.facts["written"].astype(np.int64) if self.columns.dialogues else self.responses

    def shapes(self, advantages: np.ndarray, rules: PackingRules) -> SampleShapes:
        """Return what packing must know of the samples with these advantages [N]."""
        masked, facts = self.has(TRUNCATED) & rules.mask_truncated, self.facts
        lengths, prompts = (facts[name].astype(np.int64) for name in ("length", "prompt_length"))
        return SampleShapes(
            lengths, prompts, facts["prompt_key"], np.where(masked, 0, self.written), advantages, masked
        )

    def select(self, indices: np.ndarray) -> StepSamples:
        """Return these samples, renumbered in this order."""
        own = {new: self.own[old] for new, old in enumerate(indices.tolist()) if old in self.own}
        prompts = [self.prompts[i] for i in indices.tolist()]
        return replace(self, prompts=prompts, facts=self.facts[indices], sampled_by=self.sampled_by[indices], own=own)

    def __add__(self, other: StepSamples) -> StepSamples:
        """Return these samples, then those of `other`, whose columns begin with the columns of these."""
        assert self.columns.dialogues == other.columns.dialogues, "a run has conversations in all of its steps or none"
        facts = np.concatenate([_widened(self.facts, other.facts.dtype), other.facts])
        own = {**self.own, **{len(self) + i: s for i, s in other.own.items()}}
        sampled_by = np.concatenate([self.sampled_by, other.sampled_by])
        return StepSamples([*self.prompts, *other.prompts], facts, sampled_by, other.columns, own)


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
