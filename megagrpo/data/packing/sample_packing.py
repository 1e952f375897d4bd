"""Packs samples into balanced micro-batches. Only this file shifts tokens into labels.

Every rank packs the same samples with the same arithmetic and keeps its share. Without communication all data-parallel
ranks get the same number of micro-batches. So pipeline schedules and collectives cannot hang on a missing one.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import overload

import numpy as np
import torch
from torch import Tensor

from megagrpo.config import RunConfig
from megagrpo.data.packing.bin_packing import fill_emptiest, imbalance, least_bins
from megagrpo.train_types import ComputedTokens, Metric, MicroBatch, TrainBatch, TrainSample, Trajectories


@dataclass(frozen=True)
class PackingRules:
    """The limits of a packing."""

    max_tokens: int  # of a micro-batch, padding included; strict
    at_least: int = 1  # micro-batches per rank, which keep a pipeline busy
    multiple_of: int = 1  # divides the number of micro-batches per rank; interleaved schedules need the pipeline size
    align: int = 1  # divides T, a multiple of `sequence_align`; sequence parallelism needs the tensor-parallel size
    # divides the length of each sequence; context parallelism splits sequences into equal chunks
    sequence_align: int = 1
    skip_zero_advantage: bool = False  # skip samples with advantage 0
    share_prompts: bool = False  # the responses to one prompt share a single copy of it
    mask_truncated: bool = False  # responses that reached their length limit have no loss tokens
    group: int = 1  # neighbouring samples that are in one micro-batch: the loss compares them


UNLIMITED = PackingRules(max_tokens=sys.maxsize)


def packing_rules(config: RunConfig, share_prompts: bool) -> PackingRules:
    """Return the packing rules of a config. `share_prompts`: whether its policy can share prompts."""
    parallel, algorithm = config.parallel, config.algorithm
    return PackingRules(
        max_tokens=config.train.max_tokens_per_micro_batch,
        at_least=parallel.pp,
        multiple_of=parallel.pp if parallel.vpp > 1 else 1,
        align=config.micro_batch_align,
        sequence_align=parallel.sequence_align,
        skip_zero_advantage=algorithm.leaves_out_zero_advantage,
        share_prompts=share_prompts,
        mask_truncated=algorithm.mask_truncated_completions,
        group=algorithm.loss.group,
    )


@dataclass(frozen=True)
class SampleShapes:
    """What packing must know of the N samples of a step, as columns [N]: no token, and no tensor of a sample."""

    lengths: np.ndarray  # int64, tokens of prompt and response
    prompt_lengths: np.ndarray  # int64, tokens before the first response token
    prompt_keys: np.ndarray  # int64, equal for samples with the same prompt: equal tokens and the same `inputs` object
    num_loss: np.ndarray  # int64, loss tokens; 0 if masked
    advantages: np.ndarray  # float64
    masked: np.ndarray  # bool: the rules take all tokens of the sample out of the loss
    trajectories: np.ndarray | None = None  # int64, index of each sample's trajectory; None: each has one sample
    trajectory_loss: np.ndarray | None = None  # int64, loss tokens of all samples of that trajectory

    @classmethod
    def of(cls, samples: Sequence[TrainSample], rules: PackingRules) -> SampleShapes:
        """Return the shapes of these samples."""
        lengths = np.array([s.token_ids.numel() for s in samples], dtype=np.int64)
        starts = lengths.cumsum() - lengths
        mask = torch.cat([torch.zeros(0, dtype=torch.bool), *(s.response_mask for s in samples)]).numpy()
        responses = np.append(np.flatnonzero(mask), mask.size)
        prompts = np.minimum(responses[np.searchsorted(responses, starts)] - starts, lengths)
        num_loss = np.searchsorted(responses, starts + lengths) - np.searchsorted(responses, starts + 1)
        masked = np.array([is_masked(s, rules) for s in samples], dtype=bool)
        known: dict[tuple[bytes, int], int] = {}
        of_prompts = (
            (s.token_ids[:length].numpy().tobytes(), id(s.inputs) if s.inputs else 0)
            for s, length in zip(samples, prompts.tolist(), strict=True)
        )
        keys = np.array([known.setdefault(prompt, len(known)) for prompt in of_prompts], dtype=np.int64)
        advantages = np.array([s.advantage for s in samples], dtype=np.float64)
        shapes = cls(lengths, prompts, keys, np.where(masked, 0, num_loss), advantages, masked)
        owners = [s.index if s.trajectory is None else s.trajectory for s in samples]
        several = any(s.trajectory is not None for s in samples)
        return shapes.of_trajectories(np.array(owners, dtype=np.int64)) if several else shapes

    def of_trajectories(self, trajectories: np.ndarray) -> SampleShapes:
        """Return these shapes of all samples of `trajectories` [N], numbered from 0."""
        loss = np.bincount(trajectories, self.num_loss).astype(np.int64)
        return replace(self, trajectories=trajectories, trajectory_loss=loss[trajectories])

    def select(self, indices: np.ndarray) -> SampleShapes:
        """Return the shapes of these samples, in this order."""
        columns = {name: column[indices] for name, column in vars(self).items() if column is not None}
        return SampleShapes(**columns)

    def trajectories_of(self, members: np.ndarray) -> np.ndarray:
        """Return the trajectories [n] int64 of the samples `members`, ascending."""
        return members if self.trajectories is None else np.unique(self.trajectories[members])


@dataclass(frozen=True)
class PackPlan:
    """The samples of every micro-batch of every data-parallel rank, and the counts of an optimizer step. It depends on
    the shapes of the samples alone, so every rank computes the same one."""

    micro_batches: tuple[np.ndarray, ...]  # int64 indices of samples; micro-batch b belongs to rank b % dp_size
    dp_size: int
    samples: np.ndarray  # [n] int64, indices of all samples of the optimizer step, including skipped ones
    num_tokens: int  # loss tokens of these samples
    packing: dict[str, Metric]  # `imbalances`
    computed: ComputedTokens
    shapes: SampleShapes  # of all samples of the step

    def of_rank(self, dp_rank: int) -> tuple[np.ndarray, ...]:
        """Return the sample indices of each micro-batch of this data-parallel rank."""
        return self.micro_batches[dp_rank :: self.dp_size]


def pack(samples: Sequence[TrainSample], rules: PackingRules, dp_rank: int = 0, dp_size: int = 1) -> TrainBatch:
    """Return data-parallel rank `dp_rank`'s micro-batches and the step's counts, of samples that are all at hand.

    Raises ValueError when a sample exceeds the token budget.
    """
    plan = plan_packing(SampleShapes.of(samples, rules), rules, dp_size)
    batch = build_batch(plan, dp_rank, dict(enumerate(samples)), rules)
    indices = tuple(s.index for s in samples)
    return replace(
        batch, samples=indices, trajectories=batch.trajectories if plan.shapes.trajectories is not None else indices
    )


def plan_packing(
    shapes: SampleShapes, rules: PackingRules, dp_size: int, members: np.ndarray | None = None
) -> PackPlan:
    """Distribute the samples of an optimizer step over micro-batches and ranks. `members` [n] are their indices, with
    samples of equal prompts next to each other; None: all.

    Samples that are skipped for an advantage of 0 still count, so the update is the same. Samples without loss tokens
    count as sequences. Raises ValueError when a sample exceeds the token budget.
    """
    members = np.arange(shapes.lengths.size) if members is None else members
    skipped = (shapes.advantages[members] == 0) & rules.skip_zero_advantage
    trained = members[~(shapes.masked[members] | skipped)]
    bundles = bundle(shapes, trained, rules)
    bins = assign(bundles.lengths, rules, dp_size)
    return PackPlan(
        micro_batches=tuple(trained[positions] for positions in bundles.positions(bins)),
        dp_size=dp_size,
        samples=members,
        num_tokens=int(shapes.num_loss[members].sum()),
        packing=imbalances([int(bundles.lengths[indices].sum()) for indices in bins], dp_size),
        computed=ComputedTokens(bundles.spans(shapes.lengths[trained]), int(shapes.num_loss[trained].sum())),
        shapes=shapes,
    )


def build_batch(plan: PackPlan, dp_rank: int, samples: Mapping[int, TrainSample], rules: PackingRules) -> TrainBatch:
    """Return the micro-batches of data-parallel rank `dp_rank` from the samples, by index, that the plan gives it.

    Their layout depends on the plan's shapes alone: a rank that does not read tokens may have zeros in their place.
    """
    return TrainBatch(
        micro_batches=tuple(
            build_micro_batch([samples[i] for i in indices.tolist()], rules, plan.shapes.select(indices))
            for indices in plan.of_rank(dp_rank)
        ),
        num_tokens=plan.num_tokens,
        num_sequences=(trajectories := plan.shapes.trajectories_of(plan.samples)).size,
        samples=tuple(plan.samples.tolist()),
        trajectories=tuple(trajectories.tolist()),
        packing=plan.packing,
        computed=plan.computed,
    )


@dataclass(frozen=True)
class Bundles:
    """Neighbouring samples that are bound to one micro-batch, because they share a copy of their prompt."""

    borders: np.ndarray  # [B + 1] int64, positions of the bundles among the samples
    shared: np.ndarray  # [B] int64, tokens of the shared copy; 0 for a bundle of one sample
    lengths: np.ndarray  # [B] int64, tokens: the shared part once, and the rest of each sample, padded

    def positions(self, bins: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the positions of the samples of each bin of bundles."""
        order = np.concatenate(bins)
        counts = np.diff(self.borders)[order]
        stops = counts.cumsum()
        positions = np.arange(counts.sum()) + np.repeat(self.borders[order] - stops + counts, counts)
        ends = np.append(0, stops)[np.cumsum([indices.size for indices in bins])]
        return np.split(positions, ends[:-1])

    def spans(self, lengths: np.ndarray) -> np.ndarray:
        """Return `ComputedTokens.spans` of samples with these lengths."""
        shared = np.repeat(self.shared, np.diff(self.borders))
        prompts = np.flatnonzero(self.shared)
        copies = np.stack([np.zeros(prompts.size, dtype=np.int64), self.shared[prompts]], axis=1)
        return np.insert(np.stack([shared, lengths], axis=1), self.borders[prompts], copies, axis=0)


def bundle(shapes: SampleShapes, samples: np.ndarray, rules: PackingRules) -> Bundles:
    """Bundle the samples [n]: with shared prompts as many same-prompt neighbours as fit, else one.

    Samples with the same prompt can share all but the prompt's last token, whose label differs between samples, rounded
    down to a multiple of `sequence_align`. Padding would otherwise separate the prompt from the sequences that continue
    it.
    """
    lengths, align = shapes.lengths[samples], rules.sequence_align
    if rules.group > 1:
        return _bundle_groups(shapes, samples, rules)
    if not rules.share_prompts:
        return Bundles(np.arange(samples.size + 1), np.zeros_like(lengths), padded(lengths, align))
    sharable = (shapes.prompt_lengths[samples] - 1) // align * align
    keys, rests = shapes.prompt_keys[samples].tolist(), padded(lengths - sharable, align).tolist()
    budget, starts, used, last = rules.max_tokens // rules.align * rules.align, list[int](), 0, None
    for position, (key, rest, prefix) in enumerate(zip(keys, rests, sharable.tolist(), strict=True)):
        if key == last and used + rest <= budget:
            used += rest
        else:
            starts.append(position)
            used, last = prefix + rest, key
    borders = np.array([*starts, samples.size])
    first, shares = borders[:-1], np.diff(borders) > 1
    return Bundles(
        borders,
        np.where(shares, sharable[first], 0),
        np.where(shares, sharable[first] + np.add.reduceat([*rests, 0], first), padded(lengths[first], align)),
    )


def _bundle_groups(shapes: SampleShapes, samples: np.ndarray, rules: PackingRules) -> Bundles:
    """Bundle the samples [n] in groups of `rules.group`, each with one copy of its prompt if all can share it."""
    lengths, align, borders = shapes.lengths[samples], rules.sequence_align, np.arange(0, samples.size + 1, rules.group)
    keys, prompts = (row[samples].reshape(-1, rules.group) for row in (shapes.prompt_keys, shapes.prompt_lengths))
    same = (keys == keys[:, :1]).all(1) & rules.share_prompts
    shared = np.where(same, (prompts.min(1, initial=1 << 40) - 1) // align * align, 0)
    rests = padded(lengths - np.repeat(shared, rules.group), align).reshape(-1, rules.group)
    return Bundles(borders, shared, shared + rests.sum(1))


@overload
def padded(length: int, multiple: int) -> int: ...


@overload
def padded(length: np.ndarray, multiple: int) -> np.ndarray: ...


def padded(length: int | np.ndarray, multiple: int) -> int | np.ndarray:
    """Return `length` rounded up to a multiple of `multiple`."""
    return -(-length // multiple) * multiple


def assign(lengths: Sequence[int] | np.ndarray, rules: PackingRules, num_ranks: int) -> list[np.ndarray]:
    """Return the bundle indices of each bin (micro-batch): k * num_ranks bins, for the smallest k that the rules allow.

    The longest bundle goes first, each into the emptiest bin. Every bin has at most `max_tokens` after alignment. Two
    bins differ by at most the longest bundle, because the fuller one was the emptier one before its last bundle. Bin b
    belongs to rank b % num_ranks. Bins are sorted from the fullest down, so two ranks also differ by at most the
    longest bundle. Raises ValueError when a bundle exceeds the budget.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    budget = rules.max_tokens // rules.align * rules.align
    longest = int(lengths.max(initial=0))
    if longest > budget:
        raise ValueError(
            f"a sample of {longest} tokens exceeds train.max_tokens_per_micro_batch {rules.max_tokens}; raise it to "
            f"{padded(longest, rules.align)} or more"
        )
    longest_first = np.argsort(-lengths, kind="stable")
    per_rank = max(rules.at_least, ceil(least_bins(lengths, budget) / num_ranks), 1)
    while True:
        per_rank = padded(per_rank, rules.multiple_of)
        chosen = fill_emptiest(lengths[longest_first], per_rank * num_ranks, budget)
        if chosen is not None:
            break
        per_rank += 1
    num_bins, bins = per_rank * num_ranks, np.empty(lengths.size, dtype=np.int64)
    bins[longest_first] = chosen
    loads, counts = (np.bincount(bins, weights, num_bins).astype(np.int64) for weights in (lengths, None))
    fullest_first = np.argsort(-loads, kind="stable")
    parts = np.split(np.argsort(bins, kind="stable"), counts.cumsum()[:-1])
    return [parts[number] for number in fullest_first.tolist()]


def build_micro_batch(
    samples: Sequence[TrainSample], rules: PackingRules = UNLIMITED, shapes: SampleShapes | None = None
) -> MicroBatch:
    """Pack samples end to end into one micro-batch. `shapes` are those of the samples, if known.

    Without samples the micro-batch has two or more padding tokens: a rank without a backward pass hangs the others.
    """
    shapes = SampleShapes.of(samples, rules) if shapes is None else shapes
    owners, starts, stops, prefixes = _sequences(shapes, rules)
    used = int((stops - starts).sum())
    missing = -used % rules.align if used else max(2, rules.align)
    if missing:  # the last sequence, of no sample
        columns = zip((owners, starts, stops, prefixes), (len(samples), 0, missing, -1), strict=True)
        owners, starts, stops, prefixes = (np.append(*column) for column in columns)
    lengths = stops - starts
    borders = np.append(0, lengths.cumsum())
    known = [*samples, _padding(max(missing, rules.sequence_align))]
    cuts = []  # (index in `known`, tokens) of each part
    for owner, start, stop in zip(owners.tolist(), starts.tolist(), stops.tolist(), strict=True):
        cuts.append((owner, slice(start, stop)))
        if (more := stop - known[owner].token_ids.numel()) > 0:
            cuts.append((-1, slice(more)))
    # The tokens after a shared prompt are those of its first sample, so only the ends of samples have no label.
    last = torch.from_numpy(borders[1:][np.append(prefixes[1:], -1) != np.arange(lengths.size)] - 1)
    in_loss = torch.from_numpy(np.repeat(np.append(~shapes.masked, True)[owners], lengths))

    def joined(rows: Sequence[Tensor]) -> Tensor:
        return torch.cat([rows[owner][tokens] for owner, tokens in cuts])

    def shifted(row: Tensor) -> Tensor:
        return row.roll(-1).index_fill_(0, last, 0)

    if any(s.token_advantages is not None for s in samples):
        advantages = shifted(joined([s.advantages for s in known]))
    else:
        of_sequences = torch.tensor([known[i].advantage for i in owners.tolist()])
        advantages = of_sequences.repeat_interleave(torch.from_numpy(lengths))
    token_ids, inputs = joined([s.token_ids for s in known]), tuple(known[i].inputs for i in owners.tolist())
    sampling = tuple(known[i].sampling for i in owners.tolist())
    return MicroBatch(
        token_ids=token_ids,
        labels=shifted(token_ids),
        position_ids=torch.from_numpy(np.arange(borders[-1]) + np.repeat(starts - borders[:-1], lengths)),
        cu_seqlens=torch.from_numpy(borders).int(),
        loss_mask=shifted(joined([s.response_mask for s in known])) & in_loss,
        advantages=advantages,
        rollout_logprobs=shifted(joined([s.rollout_logprobs for s in known])).float(),
        samples=torch.tensor([known[i].index for i in owners.tolist()]),
        sequence_index=torch.from_numpy(np.repeat(np.arange(lengths.size), lengths)),
        prefixes=torch.from_numpy(prefixes) if (prefixes >= 0).any() else None,
        inputs=inputs if any(inputs) else (),
        sampling=sampling if any(sampling) else (),
        several=_trajectories(shapes, owners),
    )


def _trajectories(shapes: SampleShapes, owners: np.ndarray) -> Trajectories | None:
    """Return the trajectories of sequences of the samples `owners` [S]; the sample after the last one is padding."""
    if shapes.trajectories is None or shapes.trajectory_loss is None:
        return None
    index, num_loss = np.append(shapes.trajectories, -1)[owners], np.append(shapes.trajectory_loss, 0)[owners]
    return Trajectories(torch.from_numpy(index), torch.from_numpy(num_loss.clip(min=1)).float())


def _sequences(shapes: SampleShapes, rules: PackingRules) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the sequences of a micro-batch: whole samples, or the prompt part that samples share, then each rest.

    The columns [S] int64 are the index of the sample, the first token, the end (after padding), and the index of the
    sequence that this one continues, or -1.
    """
    count = shapes.lengths.size
    bundles = bundle(shapes, np.arange(count), replace(rules, max_tokens=sys.maxsize))
    prompts = np.flatnonzero(bundles.shared)
    before = bundles.borders[prompts]  # each copy of a prompt comes before the first sample that continues it
    copies = np.full(bundles.shared.size, -1)
    copies[prompts] = before + np.arange(prompts.size)
    of_samples = np.diff(bundles.borders)
    shared, prefix = np.repeat(bundles.shared, of_samples), np.repeat(copies, of_samples)
    stops = shared + padded(shapes.lengths - shared, rules.sequence_align)
    return (
        np.insert(np.arange(count), before, before),
        np.insert(shared, before, 0),
        np.insert(stops, before, bundles.shared[prompts]),
        np.insert(prefix, before, -1),
    )


def _padding(length: int) -> TrainSample:
    """Return `length` padding tokens. They have no loss tokens and belong to no sample."""
    zeros = torch.zeros(length, dtype=torch.long)  # integers first: in a trace, floating-point tensors have no data
    return TrainSample(zeros, zeros.bool(), zeros.float(), 0.0)


def is_masked(sample: TrainSample, rules: PackingRules) -> bool:
    """Return whether the rules take all tokens of the sample out of the loss."""
    return rules.mask_truncated and sample.truncated


def imbalances(loads: Sequence[int], num_ranks: int) -> dict[str, Metric]:
    """Return metrics of a packing: largest over mean number of tokens, of micro-batches and of data-parallel ranks.

    `loads` are the tokens of the bins in the order of `assign`. With L the longest bundle and m the mean micro-batch,
    in tokens, and k micro-batches on a rank, the metrics are at most 1 + L / m and 1 + L / (k m).
    """
    per_rank = [sum(loads[rank::num_ranks]) for rank in range(num_ranks)]
    return {
        "packing/micro_batch_imbalance": Metric(imbalance(loads)),
        "packing/rank_imbalance": Metric(imbalance(per_rank)),
    }


def slices(num_samples: int, count: int, seed: int) -> list[np.ndarray]:
    """Split the indices of the samples into `count` parts. They are shuffled by `seed` and cut into lengths that differ
    by at most one, like TRL's generation batches. Within a part they ascend, so samples of one prompt stay adjacent.
    Fewer samples than `count` give fewer parts."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(num_samples, generator=generator).numpy()
    borders = [num_samples * i // count for i in range(count + 1)]
    return [np.sort(order[start:stop]) for start, stop in itertools.pairwise(borders) if stop > start]
