"""The dataclasses of training that rooms exchange, with their shapes: from a sample to its loss, and the run's state.

Legend: L tokens of one sample, T tokens of one micro-batch, S sequences packed into it, N samples of a step (n tokens
of a part), V padded vocabulary (a tensor-parallel rank holds V/tp), H hidden size.

Every [T] array is label-aligned: position t describes labels[t] = token_ids[t + 1], the next token. Only `data.packing`
shifts. The last position of a sample has no label, and its loss_mask is False.

The examples in the docstrings continue the story of `types.py`, with its prompt and its two scored rollouts.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class TrainSample:
    """A rollout as arrays [L]: the prompt, then the response. Nothing is shifted yet.

    >>> from megagrpo.algorithms.advantages import to_samples
    >>> first, second = to_samples(scored, advantages=torch.tensor([[1.0, -1.0]]))
    >>> first.token_ids.tolist(), first.response_mask.int().tolist()
    ([5, 6, 7, 8, 9, 2], [0, 0, 0, 1, 1, 1])
    >>> first.rollout_logprobs.tolist()
    [0.0, 0.0, 0.0, -0.5, -0.25, -0.125]
    """

    token_ids: Tensor  # [L] int64
    response_mask: Tensor  # [L] bool, True at tokens that the policy wrote
    rollout_logprobs: Tensor  # [L] float32, 0 at other tokens
    advantage: float
    index: int = -1  # index among the step's samples; -1 for padding
    truncated: bool = False  # the response reached its length limit
    inputs: Mapping[str, Any] = field(default_factory=dict)  # `Prompt.inputs`
    sampling: Mapping[str, Any] = field(default_factory=dict)  # the row's own parameters that change log-probs
    trajectory: int | None = None  # index among the step's trajectories; None: `index`, the trajectory has one sample
    token_advantages: Tensor | None = None  # [L] float32, with `algorithm.advantage_by`; None: all are `advantage`
    readings: Mapping[str, TrainSample | None] | None = None  # by teacher, None: it teaches not; None: all read this

    @property
    def advantages(self) -> Tensor:
        """[L] float32: the advantage of each token."""
        if self.token_advantages is not None:
            return self.token_advantages
        return torch.full((self.token_ids.numel(),), self.advantage, dtype=torch.float32)


@dataclass(frozen=True)
class Trajectories:
    """The trajectories of the S sequences of a micro-batch, in a step with trajectories of several samples.

    >>> from dataclasses import replace
    >>> from megagrpo.data.packing.sample_packing import build_micro_batch
    >>> both = build_micro_batch([first, replace(second, trajectory=0)])  # 3 and 2 loss tokens
    >>> both.several.index.tolist(), both.several.num_loss.tolist()
    ([0, 0], [5.0, 5.0])
    """

    index: Tensor  # [S] int64, `TrainSample.trajectory` of each sequence; -1 for padding
    num_loss: Tensor  # [S] float32, loss tokens of all samples of that trajectory, at least 1


@dataclass(frozen=True)
class RefHead:
    """The inputs of another model's LM head for one micro-batch: the reference's or a teacher's. Its logits are
    computed in tiles, when needed.

    >>> head = RefHead(hidden=torch.ones(5, 4), weight=torch.ones(10, 4))  # 5 loss tokens, H = 4, V = 10 on one rank
    >>> (head.hidden @ head.weight.t()).shape
    torch.Size([5, 10])
    """

    hidden: Tensor  # [n, H] final hidden states at the n loss tokens of this context-parallel rank, in order
    weight: Tensor  # [V/tp, H] this rank's rows of the head
    logit_cap: float | None = None  # its logits x become cap tanh(x / cap)


@dataclass(frozen=True)
class TopLogprobs:
    """The k most likely tokens of a model at each position, most likely first. In a divergence the others count
    together, as one outcome.

    >>> top = TopLogprobs(logprobs=torch.tensor([[-0.2, -2.0]] * 5), token_ids=torch.tensor([[7, 3]] * 5))  # k = 2
    """

    logprobs: Tensor  # [T, k] or, at the n loss tokens of a rank, [n, k] float32
    token_ids: Tensor  # the same shape, int64


@dataclass(frozen=True)
class OtherHead:
    """The head, or the most likely tokens, of a model that the policy is compared with, and their divergence.

    >>> OtherHead(top, "reverse").at(torch.tensor([0, 2])).head.token_ids.tolist()
    [[7, 3], [7, 3]]
    """

    head: RefHead | TopLogprobs
    direction: str
    mix: float = 0.5

    def at(self, tokens: Tensor) -> OtherHead:
        """Return the part for these loss tokens [n] of a rank. Hidden states of a head are theirs already."""
        if isinstance(self.head, RefHead):
            return self
        return replace(self, head=TopLogprobs(self.head.logprobs[tokens], self.head.token_ids[tokens]))


@dataclass(frozen=True)
class TeacherTerm:
    """What the loss needs from one teacher for a micro-batch; `other` and `logprobs` exclude each other.

    >>> TeacherTerm("large", torch.ones(5), OtherHead(top, "reverse")).logprobs is None
    True
    """

    name: str
    weights: Tensor  # [T] float32: factor of the divergence, or of the advantage, of each token
    other: OtherHead | None = None  # compares next-token distributions
    logprobs: Tensor | None = None  # [T] float32 of the sampled tokens, which give each token an advantage

    def to(self, device: torch.device) -> TeacherTerm:
        """Return a copy with all [T] tensors on `device`."""
        return replace(self, **_moved(self, device))


@dataclass(frozen=True)
class StepTerms:
    """A micro-batch's loss inputs that packing cannot know: they need a forward pass or numbers of all ranks' samples.

    A term is None if the loss does not need it. Terms from a forward pass exist on the last pipeline stage only and are
    None on others. `Learning.with_logprobs` and `Reference.annotate` add the log-probs once per batch.
    `policy.step_terms` adds the terms below them before each optimizer step.

    >>> StepTerms(ref_logprobs=torch.tensor([0.0, 0.0, -0.75, -0.25, -0.125, 0.0])).old_logprobs is None
    True
    """

    # [T] float32, with updates_per_step > 1 or kl_in_reward; None: policy_logprobs, detached
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None  # [T] float32, with a KL term whose estimator uses the sampled token
    ref_head: RefHead | None = None  # with a KL term over the whole vocabulary (kl_estimator full_*)
    high_entropy: Tensor | None = None  # [T] bool, with top_entropy_quantile < 1: tokens that the policy term counts
    entropy_weights: Tensor | None = None  # [T] float32, with an entropy bonus: the loss falls by weight x entropy
    values: Tensor | None = None  # [T] float32, with a critic: its values before the step
    returns: Tensor | None = None  # [T] float32, with a critic: the targets of its values
    loss_weights: Tensor | None = None  # [T] float32, with loss weights of tasks: of each token's policy term and KL
    teachers: tuple[TeacherTerm, ...] = ()  # with `algorithm.teacher`

    def to(self, device: torch.device) -> StepTerms:
        """Return a copy with all [T] tensors on `device`. Heads stay on their device."""
        return replace(self, **_moved(self, device), teachers=tuple(term.to(device) for term in self.teachers))

    def others(self, direction: str, tokens: Tensor) -> list[OtherHead]:
        """Return the heads of the reference, compared in this direction, and of teachers, for the loss tokens [n]."""
        of_reference = [] if self.ref_head is None else [OtherHead(self.ref_head, direction)]
        return [*of_reference, *(term.other.at(tokens) for term in self.teachers if term.other is not None)]


@dataclass(frozen=True)
class MicroBatch:
    """S sequences packed end to end, T tokens in total. If T needs padding, the padding is the last sequence.

    A sequence is a sample or a part of one. If samples share a prompt, the prompt without its last token is a sequence.
    Each of its samples is then [last token of the prompt, response] and continues that sequence (`prefixes`).

    Tensors of sequences ([S], [S + 1]) stay on the host: layouts of memory and kernels depend on their numbers.

    >>> from megagrpo.data.packing.sample_packing import PackingRules, build_micro_batch, pack
    >>> m = build_micro_batch([first, second])
    >>> m.token_ids.tolist(), m.cu_seqlens.tolist()  # T = 11, S = 2
    ([5, 6, 7, 8, 9, 2, 5, 6, 7, 8, 3], [0, 6, 11])
    >>> m.labels.tolist(), m.loss_mask.int().tolist()  # the prompt's last token predicts the first of the response
    ([6, 7, 8, 9, 2, 0, 6, 7, 8, 3, 0], [0, 0, 1, 1, 1, 0, 0, 0, 1, 1, 0])
    >>> m.rollout_logprobs.tolist()
    [0.0, 0.0, -0.5, -0.25, -0.125, 0.0, 0.0, 0.0, -0.5, -1.0, 0.0]
    >>> shared = build_micro_batch([first, second], PackingRules(max_tokens=16, share_prompts=True))
    >>> shared.token_ids.tolist(), shared.cu_seqlens.tolist(), shared.prefixes.tolist()  # T = 9, S = 3
    ([5, 6, 7, 8, 9, 2, 7, 8, 3], [0, 2, 6, 9], [-1, 0, 0])
    >>> shared.position_ids.tolist(), shared.loss_mask.int().tolist()
    ([0, 1, 2, 3, 4, 5, 2, 3, 4], [0, 0, 1, 1, 1, 0, 1, 1, 0])
    """

    token_ids: Tensor  # [T] int64
    labels: Tensor  # [T] int64, token_ids of the next position; 0 at a sample's last
    position_ids: Tensor  # [T] int64, position in the sample, from 0
    cu_seqlens: Tensor  # [S + 1] int32, borders of the sequences
    loss_mask: Tensor  # [T] bool, True at loss tokens; only packing decides this
    advantages: Tensor  # [T] float32, equal for all tokens of a sample, or of a turn
    rollout_logprobs: Tensor  # [T] float32
    samples: Tensor  # [S] int64, `TrainSample.index` of each sequence
    sequence_index: Tensor  # [T] int64, index of each token's sequence
    prefixes: Tensor | None = None  # [S] int64, index of the sequence that each one continues, or -1; None: all -1
    terms: StepTerms = field(default_factory=StepTerms)
    inputs: tuple[Mapping[str, Any], ...] = ()  # [S], `TrainSample.inputs` of each sequence; () if all are empty
    # [tokens of this rank's layers, its M layers with experts, k] uint8 or int16: the experts that every pass takes;
    # None: those of the router's scores
    routes: Tensor | None = None
    sampling: tuple[Mapping[str, Any], ...] = ()  # [S], `TrainSample.sampling` of each sequence; () if all are empty
    several: Trajectories | None = None  # None: each trajectory of the step has one sample
    readings: Mapping[str, Reading] = field(default_factory=dict)  # of teachers that do not read this micro-batch

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.token_ids.numel()

    @property
    def trajectories(self) -> Tensor:
        """[S] int64: index of each sequence's trajectory; -1 for padding."""
        return self.samples if self.several is None else self.several.index

    @property
    def num_sequences(self) -> int:
        """S."""
        return self.samples.numel()

    def with_terms(self, **terms: Any) -> MicroBatch:
        """Return a copy with these fields of `StepTerms`. Other terms stay."""
        return replace(self, terms=replace(self.terms, **terms))

    def with_advantages(self, of_trajectories: Tensor) -> MicroBatch:
        """Return a copy with these advantages [N] of the step's trajectories."""
        return replace(self, advantages=self.spread(self.trajectories, of_trajectories.float()))

    def spread(self, owners: Tensor, values: Tensor) -> Tensor:
        """Return [T]: for each token the value in [N] of its sequence's owner [S]; 0 at padding, whose owner is -1."""
        return torch.where(owners >= 0, values[owners], 0.0)[self.sequence_index]

    def to(self, device: torch.device) -> MicroBatch:
        """Return a copy with all [T] tensors on `device`, without waiting for the transfer."""
        of_sequences = dict(cu_seqlens=self.cu_seqlens, samples=self.samples, prefixes=self.prefixes)
        return replace(self, **_moved(self, device) | of_sequences, terms=self.terms.to(device))


def _moved(rows: StepTerms | TeacherTerm | MicroBatch, device: torch.device) -> dict[str, Any]:
    return {name: moved(row, device) for name, row in vars(rows).items() if isinstance(row, Tensor)}


def moved(row: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on `device`, without waiting for the transfer. From a host to a GPU it uses pinned memory."""
    pinned = row.pin_memory() if device.type == "cuda" and row.device.type == "cpu" else row
    return pinned.to(device, non_blocking=True)


@dataclass(frozen=True)
class Reading:
    """What one teacher reads of a micro-batch: other prompts, or some of its samples.

    >>> Reading(m, m.loss_mask).tokens.int().tolist()  # the teacher reads the same tokens
    [0, 0, 1, 1, 1, 0, 0, 0, 1, 1, 0]
    """

    micro_batch: MicroBatch
    tokens: Tensor  # [T] bool, loss tokens of the policy's micro-batch: in order, those of the teacher's


@dataclass(frozen=True, eq=False)
class ComputedTokens:
    """The tokens that one optimizer step runs through the model, on all ranks, unpadded. FLOPs are counted from them.

    >>> pack([first, second], PackingRules(max_tokens=16)).computed.spans.tolist()
    [[0, 6], [0, 5]]
    >>> pack([first, second], PackingRules(max_tokens=16, share_prompts=True)).computed.spans.tolist()
    [[0, 2], [2, 6], [2, 5]]
    """

    # [n, 2] int64, start and stop of each computed part of a sample; it attends to the sample's tokens < stop
    spans: np.ndarray = field(default_factory=lambda: np.zeros((0, 2), dtype=np.int64))
    num_loss: int = 0  # loss tokens among them; only they have logits


@dataclass(frozen=True)
class TrainBatch:
    """The micro-batches of this data-parallel rank for one optimizer step, and counts over all ranks.

    The counts are the loss's denominators. They do not depend on the layout: here each of two ranks gets one sample.

    >>> batch = pack([first, second], PackingRules(max_tokens=16), dp_rank=1, dp_size=2)
    >>> batch.num_tokens, batch.num_sequences, [m.samples.tolist() for m in batch.micro_batches]
    (5, 2, [[1]])
    """

    micro_batches: tuple[MicroBatch, ...]
    num_tokens: int  # loss tokens of all ranks, including samples that were skipped for an advantage of 0
    num_sequences: int  # trajectories of all ranks, including those of skipped samples
    packing: dict[str, Metric] = field(default_factory=dict)  # metrics of the packing's balance over all ranks
    samples: tuple[int, ...] = ()  # `TrainSample.index` of all their samples
    trajectories: tuple[int, ...] = ()  # `TrainSample.trajectory` of the `num_sequences` trajectories, ascending
    computed: ComputedTokens = field(default_factory=ComputedTokens)

    def with_terms(self, **terms: Sequence[Any]) -> TrainBatch:
        """Return a copy whose micro-batches have these fields of `StepTerms`, one value for each. Other terms stay."""
        rows = [dict(zip(terms, values, strict=True)) for values in zip(*terms.values(), strict=True)]
        return replace(
            self, micro_batches=tuple(m.with_terms(**row) for m, row in zip(self.micro_batches, rows, strict=True))
        )

    def with_routes(self, routes: Sequence[Tensor]) -> TrainBatch:
        """Return a copy whose micro-batches have these routes, one tensor for each."""
        pairs = zip(self.micro_batches, routes, strict=True)
        return replace(self, micro_batches=tuple(replace(m, routes=rows) for m, rows in pairs))

    def with_advantages(self, of_trajectories: Tensor) -> TrainBatch:
        """Return a copy with these advantages [N] of the step's trajectories."""
        return replace(self, micro_batches=tuple(m.with_advantages(of_trajectories) for m in self.micro_batches))


@dataclass(frozen=True)
class LossInputs:
    """The arguments of a loss for one micro-batch.

    >>> inputs = LossInputs(policy_logprobs=m.rollout_logprobs, entropy=torch.zeros(11), micro_batch=m)
    """

    policy_logprobs: Tensor  # [T] float32, with gradient
    entropy: Tensor  # [T] float32 in nats, with gradient if the micro-batch has `entropy_weights`
    micro_batch: MicroBatch
    full_kl: Tensor | None = None  # [T] float32, with gradient: KL over the whole vocabulary; None without `ref_head`
    divergences: tuple[Tensor, ...] = ()  # [T] float32 each, with gradient: from the teachers with distributions

    @classmethod
    def of(
        cls, logprobs: Tensor, entropy: Tensor, micro_batch: MicroBatch, divergences: Sequence[Tensor]
    ) -> LossInputs:
        """Return the inputs with the first of `StepTerms.others`' divergences."""
        of_reference = micro_batch.terms.ref_head is not None
        full_kl = divergences[0] if of_reference else None
        return cls(logprobs, entropy, micro_batch, full_kl, tuple(divergences[of_reference:]))


AGREEMENT = "routing/agreement"
"""The metric of routing replay: its name; that of one layer is AGREEMENT/LAYER, with the layer's number from 0."""

_MERGES: dict[str, Callable[[Any, Any], Any]] = {
    "mean": operator.add,
    "max": max,
    "min": min,
    "last": lambda _, later: later,
}


@dataclass(frozen=True)
class Metric:
    """A metric, and how it is reduced over micro-batches, ranks and optimizer steps.

    `mean`: `sum` and `count` add up over micro-batches and ranks; `value` is their quotient, over optimizer steps the
    mean of values. `max`, `min`, `last`: `sum` holds that number instead. A metric with count 0 has no value.

    >>> Metric(sum=3.0, count=2).merge(Metric(sum=5.0, count=2)).value  # (3 + 5) / 4
    2.0
    >>> Metric(3.0, 2, "max").merge(Metric(5.0, 2, "max")).value
    5.0
    """

    sum: Tensor | float
    count: Tensor | float = 1.0
    reduce: Literal["mean", "max", "min", "last"] = "mean"

    @property
    def value(self) -> float:
        """The metric as a number. Only for metrics on the host, whose `sum` and `count` are floats."""
        number: Any = self.sum / self.count if self.reduce == "mean" else self.sum
        return number

    def merge(self, other: Metric) -> Metric:
        """Return the metric of this part and of `other` together."""
        return Metric(_MERGES[self.reduce](self.sum, other.sum), self.count + other.count, self.reduce)


@dataclass(frozen=True)
class LossOutput:
    """The result of a loss for one micro-batch: `numerator` is a sum over the micro-batch, which the policy divides by
    the denominator of the whole step.

    >>> numerator = -(m.advantages * inputs.policy_logprobs)[m.loss_mask].sum()  # 0.875 of first, -1.5 of second
    >>> output = LossOutput(numerator, {"entropy": Metric(0.0, count=5)})
    >>> (output.numerator / batch.num_tokens).item()
    -0.125
    """

    numerator: Tensor  # scalar float32
    metrics: dict[str, Metric]  # of this micro-batch


LossFn = Callable[[LossInputs], LossOutput]


@dataclass
class TrainState:
    """What a checkpoint restores besides weights and optimizer.

    >>> state = TrainState(step=2, weight_version=2, cursor=16)  # after two steps of 8 prompts
    """

    step: int = 0  # steps finished
    weight_version: int = 0  # weight syncs finished
    best_step: int = 0  # step of the checkpoint with the best evaluation; 0: none
    best_value: float | None = None  # value of `evaluation.keep_best` at that step
    cursor: int = 0  # prompts drawn or skipped since the start
    pass_rates: list[tuple[int, float, int]] = field(default_factory=list)  # of the curriculum: prompt_id, rate, epoch
    data: dict[str, Any] = field(default_factory=dict)  # name, rows, checksum of `data.train`; epoch and joins of rows
    source: str = ""  # state of `data.source`, of `SourcedPrompts`; on rank 0 only
    skipped_steps: int = 0  # optimizer steps skipped because loss or gradient was NaN or infinite
    skipped_in_a_row: int = 0  # skipped optimizer steps since the last one that was taken
    mismatch_alarms: int = 0  # steps with a warning of the train/rollout mismatch
    evaluated: int = -1  # the last step with a finished evaluation
    first_mismatches: list[float] = field(default_factory=list)  # `token_mult_prob_error` of the run's first steps
    entropy_coef: float | None = None  # weight of an adaptive entropy bonus; None: the configured weight
    ahead: list[dict[str, Any]] = field(default_factory=list)  # of an older checkpoint: groups that wait for their step
    last_entropy: float | None = None  # mean entropy of the last optimizer step over the tokens that the bonus counts
