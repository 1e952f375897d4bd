"""Packs samples into balanced micro-batches. Only this file shifts tokens into labels.

Every rank packs the same samples with the same arithmetic and keeps its share. Without communication all data-parallel
ranks get the same number of micro-batches. So pipeline schedules and collectives cannot hang on a missing one.
"""

from __future__ import annotations

import heapq
import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

import numpy as np
import torch

from megagrpo.config import RunConfig
from megagrpo.types import ComputedTokens, Metric, MicroBatch, TrainBatch, TrainSample


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
    )


def pack(samples: Sequence[TrainSample], rules: PackingRules, dp_rank: int = 0, dp_size: int = 1) -> TrainBatch:
    """Return data-parallel rank `dp_rank`'s micro-batches, the step's counts, and `imbalances` of the packing.

    Samples that are skipped for an advantage of 0 still count, so the update is the same. Samples without loss tokens
    count as sequences. Raises ValueError when a sample exceeds the token budget.
    """
    trained = [s for s in samples if not (is_masked(s, rules) or (rules.skip_zero_advantage and s.advantage == 0))]
    bundles = bundle(trained, rules)
    lengths = [packed_length(b, rules.sequence_align) for b in bundles]
    bins = assign(lengths, rules, dp_size)
    mine = [[sample for i in indices for sample in bundles[i]] for indices in bins[dp_rank::dp_size]]
    return TrainBatch(
        micro_batches=tuple(build_micro_batch(chosen, rules) for chosen in mine),
        num_tokens=sum(int(loss_mask_of(s, rules).sum()) for s in samples),
        num_sequences=len(samples),
        samples=tuple(s.index for s in samples),
        packing=imbalances([sum(lengths[i] for i in indices) for indices in bins], dp_size),
        computed=computed_tokens(bundles, rules),
    )


def computed_tokens(bundles: Sequence[Sequence[TrainSample]], rules: PackingRules) -> ComputedTokens:
    """Return the tokens of these bundles: the shared part of a bundle's samples once, and the rest of each sample."""
    spans: list[tuple[int, int]] = []
    for samples in bundles:
        shared = shared_length(samples, rules.sequence_align)
        spans += [(0, shared)] * (shared > 0) + [(shared, sample.token_ids.numel()) for sample in samples]
    return ComputedTokens(
        tuple(spans), sum(int(loss_mask_of(sample, rules).sum()) for samples in bundles for sample in samples)
    )


def bundle(samples: Sequence[TrainSample], rules: PackingRules) -> list[list[TrainSample]]:
    """Group samples bound to one micro-batch: with shared prompts as many same-prompt neighbours as fit, else one."""
    bundles: list[list[TrainSample]] = []
    for sample in samples:
        last = bundles[-1] if bundles and rules.share_prompts and same_prompt(bundles[-1][0], sample) else None
        if (
            last is not None
            and packed_length([*last, sample], rules.sequence_align) <= rules.max_tokens // rules.align * rules.align
        ):
            last.append(sample)
        else:
            bundles.append([sample])
    return bundles


def packed_length(bundle: Sequence[TrainSample], sequence_align: int = 1) -> int:
    """Return the tokens, padded, of samples that share their prompt: the shared part once, and each sample's rest."""
    shared = shared_length(bundle, sequence_align)
    return shared + sum(padded(s.token_ids.numel() - shared, sequence_align) for s in bundle)


def shared_length(bundle: Sequence[TrainSample], sequence_align: int = 1) -> int:
    """Return how many tokens samples with the same prompt can share.

    These are all but the prompt's last, whose label differs between samples, rounded down to a multiple of
    `sequence_align`. Padding would otherwise separate the prompt from the sequences that continue it.
    """
    return (prompt_length(bundle[0]) - 1) // sequence_align * sequence_align if len(bundle) > 1 else 0


def padded(length: int, multiple: int) -> int:
    """Return `length` rounded up to a multiple of `multiple`."""
    return -(-length // multiple) * multiple


def prompt_length(sample: TrainSample) -> int:
    """Return the number of tokens before the first response token."""
    return int((~sample.response_mask).cumprod(0).sum())


def same_prompt(one: TrainSample, other: TrainSample) -> bool:
    """Return whether two samples have the same prompt: equal tokens and, if any, the same `inputs` object."""
    if one.inputs is not other.inputs and (one.inputs or other.inputs):
        return False
    length = prompt_length(one)
    return length == prompt_length(other) and torch.equal(one.token_ids[:length], other.token_ids[:length])


def assign(lengths: Sequence[int], rules: PackingRules, num_ranks: int) -> list[list[int]]:
    """Return the bundle indices of each bin (micro-batch): k * num_ranks bins, for the smallest k that the rules allow.

    The longest bundle goes first, each into the emptiest bin. Every bin has at most `max_tokens` after alignment. Two
    bins differ by at most the longest bundle, because the fuller one was the emptier one before its last bundle. Bin b
    belongs to rank b % num_ranks. Bins are sorted from the fullest down, so two ranks also differ by at most the
    longest bundle. Raises ValueError when a bundle exceeds the budget.
    """
    budget = rules.max_tokens // rules.align * rules.align
    longest = max(lengths, default=0)
    if longest > budget:
        raise ValueError(
            f"a sample of {longest} tokens exceeds train.max_tokens_per_micro_batch {rules.max_tokens}; raise it to "
            f"{padded(longest, rules.align)} or more"
        )
    longest_first = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    per_rank = max(rules.at_least, ceil(_least_bins(lengths, budget) / num_ranks), 1)
    while True:
        per_rank = ceil(per_rank / rules.multiple_of) * rules.multiple_of
        bins = _fill(lengths, longest_first, per_rank * num_ranks, budget)
        if bins is not None:
            return sorted(bins, key=lambda b: -sum(lengths[i] for i in b))
        per_rank += 1


def _least_bins(lengths: Sequence[int], budget: int) -> int:
    """Return a lower bound for the number of bins, so that `assign` makes few attempts. It is the largest of two kinds:

    - Martello and Toth's L2, for each small size t: bundles over half the budget share no bin, and those of t to half
      of it fill the room beside them, except in bins whose bundle leaves less than t.
    - For each k below 64: at most k bundles over budget / (k + 1) share a bin.
    """
    ordered = np.sort(np.asarray(lengths, dtype=np.int64))
    total = np.concatenate([[0], ordered.cumsum()])
    half = np.searchsorted(ordered, budget // 2, side="right")
    t = np.concatenate([[0], ordered[:half]])
    start, alone = np.searchsorted(ordered, t), np.searchsorted(ordered, budget - t, side="right")
    room = (alone - half) * budget - (total[alone] - total[half])
    beside = max(0, -int(-(total[half] - total[start] - room).max() // budget))
    k = np.arange(1, 64)
    counts = len(lengths) - np.searchsorted(ordered, budget // (k + 1), side="right")
    return max(len(lengths) - int(half) + beside, int((-(-counts // k)).max()))


def _fill(lengths: Sequence[int], longest_first: Sequence[int], num_bins: int, budget: int) -> list[list[int]] | None:
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    emptiest = [(0, number) for number in range(num_bins)]  # a heap of (load, bin)
    for index in longest_first:
        load, number = emptiest[0]
        if load + lengths[index] > budget:
            return None
        bins[number].append(index)
        heapq.heapreplace(emptiest, (load + lengths[index], number))
    return [sorted(b) for b in bins]


@dataclass(frozen=True)
class _Sequence:
    """The tokens [start, stop) of a sample, which is padded to `stop` or longer."""

    sample: TrainSample
    start: int
    stop: int
    prefix: int = -1  # index in the micro-batch of the sequence that this one continues; -1: none


def build_micro_batch(samples: Sequence[TrainSample], rules: PackingRules = UNLIMITED) -> MicroBatch:
    """Pack samples end to end into one micro-batch.

    Without samples the micro-batch has two or more padding tokens: a rank without a backward pass hangs the others.
    """
    sequences = _sequences(samples, rules)
    used = sum(s.stop - s.start for s in sequences)
    missing = -used % rules.align if used else max(2, rules.align)
    if missing:
        sequences.append(_Sequence(_padding(missing), 0, missing))
    cut = [(s, slice(s.start, s.stop)) for s in sequences]
    lengths = torch.tensor([s.stop - s.start for s in sequences])
    return MicroBatch(
        token_ids=torch.cat([s.sample.token_ids[span] for s, span in cut]),
        labels=torch.cat([_shift(s.sample.token_ids)[span] for s, span in cut]),
        position_ids=torch.cat([torch.arange(s.start, s.stop) for s in sequences]),
        cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0).int()]),
        loss_mask=torch.cat([loss_mask_of(s.sample, rules)[span] for s, span in cut]),
        advantages=torch.tensor([s.sample.advantage for s in sequences]).repeat_interleave(lengths),
        rollout_logprobs=torch.cat([_shift(s.sample.rollout_logprobs)[span] for s, span in cut]).float(),
        samples=torch.tensor([s.sample.index for s in sequences]),
        sequence_index=torch.arange(len(sequences)).repeat_interleave(lengths),
        prefixes=torch.tensor([s.prefix for s in sequences]) if any(s.prefix >= 0 for s in sequences) else None,
        inputs=tuple(s.sample.inputs for s in sequences) if any(s.sample.inputs for s in sequences) else (),
    )


def _sequences(samples: Sequence[TrainSample], rules: PackingRules) -> list[_Sequence]:
    """Return a micro-batch's sequences: whole samples, or the prompt part that samples share, then each one's rest."""
    sequences: list[_Sequence] = []
    for group in bundle(samples, replace(rules, max_tokens=sys.maxsize)):
        shared, prefix = shared_length(group, rules.sequence_align), -1
        if shared:
            prefix = len(sequences)
            sequences.append(_Sequence(group[0], 0, shared))
        for sample in group:
            stop = shared + padded(sample.token_ids.numel() - shared, rules.sequence_align)
            sequences.append(_Sequence(_lengthened(sample, stop), shared, stop, prefix))
    return sequences


def _lengthened(sample: TrainSample, length: int) -> TrainSample:
    """Return the sample padded to `length`."""
    if length == sample.token_ids.numel():
        return sample
    more = _padding(length - sample.token_ids.numel())
    return replace(
        sample,
        token_ids=torch.cat([sample.token_ids, more.token_ids]),
        response_mask=torch.cat([sample.response_mask, more.response_mask]),
        rollout_logprobs=torch.cat([sample.rollout_logprobs, more.rollout_logprobs]),
    )


def _padding(length: int) -> TrainSample:
    """Return `length` padding tokens. They have no loss tokens and belong to no sample."""
    zeros = torch.zeros(length, dtype=torch.long)  # integers first: in a trace, floating-point tensors have no data
    return TrainSample(zeros, zeros.bool(), zeros.float(), 0.0)


def is_masked(sample: TrainSample, rules: PackingRules) -> bool:
    """Return whether the rules take all tokens of the sample out of the loss."""
    return rules.mask_truncated and sample.truncated


def loss_mask_of(sample: TrainSample, rules: PackingRules = UNLIMITED) -> torch.Tensor:
    """Return [L] bool, label-aligned: True at t if token t + 1 is part of the response and in the loss."""
    shifted = _shift(sample.response_mask)
    return torch.zeros_like(shifted) if is_masked(sample, rules) else shifted


def _shift(row: torch.Tensor) -> torch.Tensor:
    """Shift a token-aligned row [L] left by one: position t describes token t + 1, and the last becomes 0."""
    return torch.cat([row[1:], row.new_zeros(1)])


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


def imbalance(loads: Sequence[int]) -> float:
    """Return the largest over the mean number of tokens. 1.0 is perfect balance, and the result without any tokens."""
    return max(loads) * len(loads) / sum(loads) if any(loads) else 1.0


def slices(samples: Sequence[TrainSample], count: int, seed: int) -> list[list[TrainSample]]:
    """Split the samples into `count` parts. They are shuffled by `seed` and cut into lengths that differ by at most
    one, like TRL's generation batches. Within a part samples keep their order, so samples of one prompt stay adjacent.
    Fewer samples than `count` give fewer parts."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(samples), generator=generator).tolist()
    borders = [len(samples) * i // count for i in range(count + 1)]
    parts = [sorted(order[start:stop]) for start, stop in itertools.pairwise(borders)]
    return [[samples[i] for i in part] for part in parts if part]
