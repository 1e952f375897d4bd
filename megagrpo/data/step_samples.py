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
        """The row of a sample: 25 bytes with one reward function and nothing else."""
        row: list[Any] = [
            ("reward", "f8"),
            ("rewards", "f8", (len(self.rewards),)),  # NaN where a function could not score
            ("logged", "f8", (len(self.logged),)),  # NaN if the call logged no such number
            ("version", "i4"),  # weight version of the first token
            ("length", "i4"),  # tokens of prompt and response
            ("flags", "u1"),
        ]
        if self.dialogues:
            counts = [(name, "i4") for name in ("response", "written", "turns", "tool_calls", "tool_failures")]
            # the prompt may have another text than the drawn one, and the response may begin with tokens of others
            row += [*counts, ("prompt_length", "i4"), ("prompt_key", "i8")]
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
    if columns.dialogues:
        begins = [int(r.written.argmax()) if r.length else len(r.response_ids) for r in rollouts]
        rows["response"], rows["written"] = [len(r.response_ids) for r in rollouts], [r.length for r in rollouts]
        pairs = list(zip(rollouts, begins, strict=True))
        rows["prompt_length"] = [len(r.prompt.token_ids) + begin for r, begin in pairs]
        rows["prompt_key"] = [prompt_key(r.prompt, r.response_ids[:begin].tolist()) for r, begin in pairs]
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


def prompt_key(prompt: Prompt, more: Sequence[int] = ()) -> int:
    """Return a 63-bit key that is equal for prompts of equal tokens (with `more` of them) and the same `inputs`."""
    contents = prompt.token_ids, tuple(more), prompt.prompt_id if prompt.inputs else None
    return int.from_bytes(hashlib.blake2b(repr(contents).encode(), digest_size=8).digest(), "big") >> 1


@dataclass(frozen=True, eq=False)
class StepSamples:
    """The N samples of a step, in prompt order, a group's samples next to each other.

    What decides about all samples (advantages, packing, metrics) reads `prompts` and `facts`, which are the same on
    every rank. Tokens, log-probs, texts and columns are in `own`: on the leader of the replica that sampled them.

    >>> samples = StepSamples.of([])
    >>> len(samples), samples.facts.dtype.itemsize
    (0, 17)
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
        return self.facts["length"] - self._prompt_lengths

    @property
    def written(self) -> np.ndarray:
        """[N] int64: tokens of each response that the policy wrote."""
        return self.facts["written"].astype(np.int64) if self.columns.dialogues else self.responses

    @property
    def _prompt_lengths(self) -> np.ndarray:
        return np.fromiter((len(prompt.token_ids) for prompt in self.prompts), np.int64, len(self))

    def shapes(self, advantages: np.ndarray, rules: PackingRules) -> SampleShapes:
        """Return what packing must know of the samples with these advantages [N]."""
        masked = self.has(TRUNCATED) & rules.mask_truncated
        if self.columns.dialogues:
            lengths, keys = self.facts["prompt_length"].astype(np.int64), self.facts["prompt_key"]
        else:
            known: dict[int, int] = {}  # id of a prompt -> key; a group's samples have one prompt
            for prompt in self.prompts:
                if id(prompt) not in known:
                    known[id(prompt)] = prompt_key(prompt)
            lengths = self._prompt_lengths
            keys = np.fromiter((known[id(prompt)] for prompt in self.prompts), np.int64, len(self))
        num_loss = np.where(masked, 0, self.written)
        return SampleShapes(self.facts["length"].astype(np.int64), lengths, keys, num_loss, advantages, masked)

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
