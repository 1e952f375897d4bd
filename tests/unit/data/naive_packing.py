"""Packing as written down first: sample by sample, on tensors. The oracle for plans from columns and whole-array builds."""

import sys
from dataclasses import dataclass, replace

import torch

from megagrpo.data.packing.sample_packing import PackingRules, assign, imbalances
from megagrpo.train_types import MicroBatch, TrainSample

UNLIMITED = PackingRules(max_tokens=sys.maxsize)


def naive_pack(samples, rules, dp_rank, dp_size):
    """(samples of each micro-batch of the rank, loss tokens, imbalances, spans, computed loss tokens)."""
    trained = [s for s in samples if not (is_masked(s, rules) or (rules.skip_zero_advantage and s.advantage == 0))]
    bundles = bundle(trained, rules)
    lengths = [packed_length(b, rules.sequence_align) for b in bundles]
    bins = [b.tolist() for b in assign(lengths, rules, dp_size)]
    mine = [[sample for i in indices for sample in bundles[i]] for indices in bins[dp_rank::dp_size]]
    balance = imbalances([sum(lengths[i] for i in indices) for indices in bins], dp_size)
    spans = []
    for group in bundles:
        shared = shared_length(group, rules.sequence_align)
        spans += [[0, shared]] * (shared > 0) + [[shared, sample.token_ids.numel()] for sample in group]
    num_loss = sum(int(loss_mask_of(s, rules).sum()) for group in bundles for s in group)
    return mine, sum(int(loss_mask_of(s, rules).sum()) for s in samples), balance, spans, num_loss


def bundle(samples: list[TrainSample], rules: PackingRules) -> list[list[TrainSample]]:
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


def packed_length(bundle: list[TrainSample], sequence_align: int = 1) -> int:
    """Return the tokens, padded, of samples that share their prompt: the shared part once, and each sample's rest."""
    shared = shared_length(bundle, sequence_align)
    return shared + sum(padded(s.token_ids.numel() - shared, sequence_align) for s in bundle)


def shared_length(bundle: list[TrainSample], sequence_align: int = 1) -> int:
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


@dataclass(frozen=True)
class _Sequence:
    """The tokens [start, stop) of a sample, which is padded to `stop` or longer."""

    sample: TrainSample
    start: int
    stop: int
    prefix: int = -1  # index in the micro-batch of the sequence that this one continues; -1: none


def naive_micro_batch(samples: list[TrainSample], rules: PackingRules = UNLIMITED) -> MicroBatch:
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


def _sequences(samples: list[TrainSample], rules: PackingRules) -> list[_Sequence]:
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
