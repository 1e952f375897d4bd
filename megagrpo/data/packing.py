"""Samples -> balanced micro-batches, and the one place where tokens are shifted into labels.

Every rank packs the same list of samples with the same arithmetic and keeps its own share, so no communication is needed and every
data-parallel rank gets the same number of micro-batches: pipeline schedules and collectives cannot hang on a missing one.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

import torch

from megagrpo.config import RunConfig
from megagrpo.types import MicroBatch, TrainBatch, TrainSample


@dataclass(frozen=True)
class PackingRules:
    """`max_tokens` is strict. `at_least` micro-batches per rank keep a pipeline busy; their number is a multiple of `multiple_of`
    (interleaved schedules need the pipeline size). Each sequence is padded to a multiple of `sequence_align` (context parallelism cuts it
    into equal chunks) and T to a multiple of `align`, itself one of `sequence_align` (sequence parallelism needs the tensor-parallel
    size). With `share_prompts` the responses to one prompt are computed behind a single copy of it. With `mask_truncated` responses that
    were cut at their greatest length have no loss tokens."""

    max_tokens: int
    at_least: int = 1
    multiple_of: int = 1
    align: int = 1
    sequence_align: int = 1
    skip_zero_advantage: bool = False
    share_prompts: bool = False
    mask_truncated: bool = False


UNLIMITED = PackingRules(max_tokens=sys.maxsize)


def packing_rules(config: RunConfig, share_prompts: bool) -> PackingRules:
    """How a configuration wants samples cut into micro-batches; `share_prompts` says whether its policy can share them."""
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
    """The micro-batches of data-parallel rank `dp_rank`, the counts of the whole step, and how even the packing is (`imbalances`).

    Samples left out for zero advantage still count, so the update is the same; those without loss tokens count as sequences. Raises
    ValueError when a sample exceeds the token budget.
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
    )


def bundle(samples: Sequence[TrainSample], rules: PackingRules) -> list[list[TrainSample]]:
    """Samples that stay in one micro-batch: neighbours with the same prompt when prompts are shared, as many as fit; else each alone."""
    bundles: list[list[TrainSample]] = []
    for sample in samples:
        last = bundles[-1] if bundles and rules.share_prompts and same_prompt(bundles[-1][0], sample) else None
        if last is not None and packed_length([*last, sample], rules.sequence_align) <= rules.max_tokens // rules.align * rules.align:
            last.append(sample)
        else:
            bundles.append([sample])
    return bundles


def packed_length(bundle: Sequence[TrainSample], sequence_align: int = 1) -> int:
    """Tokens, padding included, of samples that share their prompt: what they share once, the rest of each."""
    shared = shared_length(bundle, sequence_align)
    return shared + sum(padded(s.token_ids.numel() - shared, sequence_align) for s in bundle)


def shared_length(bundle: Sequence[TrainSample], sequence_align: int = 1) -> int:
    """Tokens that samples with the same prompt can share: all but its last, whose label is another one in each of them, and of these as
    many as need no padding, which would stand between the prompt and what continues it."""
    return (prompt_length(bundle[0]) - 1) // sequence_align * sequence_align if len(bundle) > 1 else 0


def padded(length: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `length`."""
    return -(-length // multiple) * multiple


def prompt_length(sample: TrainSample) -> int:
    """Tokens before the first response token."""
    return int((~sample.response_mask).cumprod(0).sum())


def same_prompt(one: TrainSample, other: TrainSample) -> bool:
    length = prompt_length(one)
    return length == prompt_length(other) and torch.equal(one.token_ids[:length], other.token_ids[:length])


def assign(lengths: Sequence[int], rules: PackingRules, num_ranks: int) -> list[list[int]]:
    """Bundle indices of each micro-batch: k * num_ranks bins for the smallest admissible k, longest bundle first into the emptiest bin.

    Bin b belongs to rank b % num_ranks. Every bin holds at most `max_tokens` after alignment, and no two differ by more than the longest
    bundle: the fuller one was the emptier one when it got its last. Bins are dealt to ranks from the fullest down, so the k bins of one
    rank and those of another differ by no more than the longest bundle either. Raises ValueError when a bundle exceeds the budget.
    """
    budget = rules.max_tokens // rules.align * rules.align
    longest = max(lengths, default=0)
    if longest > budget:
        raise ValueError(
            f"a sample of {longest} tokens exceeds train.max_tokens_per_micro_batch {rules.max_tokens}; raise it to "
            f"{padded(longest, rules.align)} or more"
        )
    per_rank = max(rules.at_least, ceil(sum(lengths) / budget / num_ranks), 1)
    while True:
        per_rank = ceil(per_rank / rules.multiple_of) * rules.multiple_of
        bins = _fill(lengths, per_rank * num_ranks, budget)
        if bins is not None:
            return sorted(bins, key=lambda b: -sum(lengths[i] for i in b))
        per_rank += 1


def _fill(lengths: Sequence[int], num_bins: int, budget: int) -> list[list[int]] | None:
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    loads = [0] * num_bins
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        emptiest = min(range(num_bins), key=lambda b: (loads[b], b))
        if loads[emptiest] + lengths[index] > budget:
            return None
        bins[emptiest].append(index)
        loads[emptiest] += lengths[index]
    return [sorted(b) for b in bins]


@dataclass(frozen=True)
class _Sequence:
    """The tokens [start, stop) of a sample, padded when it is shorter, continuing sequence number `prefix` of the micro-batch unless it is
    -1."""

    sample: TrainSample
    start: int
    stop: int
    prefix: int = -1


def build_micro_batch(samples: Sequence[TrainSample], rules: PackingRules = UNLIMITED) -> MicroBatch:
    """Pack samples end to end. With none (a rank that got no sample), two tokens that count for nothing stand in: every rank must run
    its backward pass, or the others wait for it for ever."""
    sequences = _sequences(samples, rules)
    used = sum(s.stop - s.start for s in sequences)
    padding = -used % rules.align if used else max(2, rules.align)
    if padding:
        sequences.append(_Sequence(_nothing(padding), 0, padding))
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
        prefixes=torch.tensor([s.prefix for s in sequences]) if any(s.prefix >= 0 for s in sequences) else None,
    )


def _sequences(samples: Sequence[TrainSample], rules: PackingRules) -> list[_Sequence]:
    """Whole samples, or where neighbours share a prompt, what they share and then the rest of each."""
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
    """The sample with tokens that count for nothing up to `length`."""
    if length == sample.token_ids.numel():
        return sample
    more = _nothing(length - sample.token_ids.numel())
    return replace(
        sample,
        token_ids=torch.cat([sample.token_ids, more.token_ids]),
        response_mask=torch.cat([sample.response_mask, more.response_mask]),
        rollout_logprobs=torch.cat([sample.rollout_logprobs, more.rollout_logprobs]),
    )


def _nothing(length: int) -> TrainSample:
    """Tokens that count for nothing."""
    zeros = torch.zeros(length)
    return TrainSample(zeros.long(), zeros.bool(), zeros, 0.0)


def is_masked(sample: TrainSample, rules: PackingRules) -> bool:
    """Whether no token of the sample is in the loss."""
    return rules.mask_truncated and sample.truncated


def loss_mask_of(sample: TrainSample, rules: PackingRules = UNLIMITED) -> torch.Tensor:
    """[L] bool, label-aligned: True at t when token t + 1 is part of the response and in the loss."""
    shifted = _shift(sample.response_mask)
    return torch.zeros_like(shifted) if is_masked(sample, rules) else shifted


def _shift(row: torch.Tensor) -> torch.Tensor:
    """Move a token-aligned row [L] one place left, so that position t speaks of token t + 1; the last place becomes 0."""
    return torch.cat([row[1:], row.new_zeros(1)])


def imbalances(loads: Sequence[int], num_ranks: int) -> dict[str, float]:
    """Metrics of a packing whose bins, as `assign` orders them, hold `loads` tokens: the largest over the mean of all micro-batches, and of
    the data-parallel ranks. With L the longest bundle and m the mean micro-batch, in tokens, and k micro-batches on a rank they are at most
    1 + L / m and 1 + L / (k m)."""
    per_rank = [sum(loads[rank::num_ranks]) for rank in range(num_ranks)]
    return {"packing/micro_batch_imbalance": imbalance(loads), "packing/rank_imbalance": imbalance(per_rank)}


def imbalance(loads: Sequence[int]) -> float:
    """Largest over mean number of tokens: 1.0 is perfect balance, also of nothing."""
    return max(loads) * len(loads) / sum(loads) if any(loads) else 1.0
