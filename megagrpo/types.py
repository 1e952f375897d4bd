"""Everything that crosses a folder border, with its shapes.

Legend: P prompts per step, G responses per prompt, L tokens of one sample, T tokens of one micro-batch, S samples packed into it,
V padded vocabulary (a tensor-parallel rank holds V/tp).

Every [T] array is label-aligned: position t speaks of labels[t] = token_ids[t + 1], the token that follows. The one shift is done in
`data.packing`. The last position of a sample has no label: its loss_mask is 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Prompt:
    """One question, ready for the engine. `prompt_id` is its place in the data set; `columns` go to the reward functions. A step that
    asks the same question again gives it another `occurrence`, and by that other seeds. `place` is its number in the run's stream of
    prompts, which no other has; None for one that was not drawn from there."""

    prompt_id: int
    token_ids: tuple[int, ...]  # [Lp]
    messages: str | list[dict[str, str]]
    columns: dict[str, Any] = field(default_factory=dict)
    occurrence: int = 0
    place: int | None = None


@dataclass(frozen=True)
class Truncation:
    """Which tokens a sampler may choose, of softmax(logits / temperature), by vLLM's rules and in its order: min_p, top_k, top_p."""

    top_p: float = 1.0  # the most likely ones until they add up to this; 1 keeps all
    top_k: int = 0  # this many of the most likely ones; 0 keeps all
    min_p: float = 0.0  # those at least this times as likely as the most likely one; 0 keeps all

    def __bool__(self) -> bool:
        """Whether it leaves anything out."""
        return self != NO_TRUNCATION


NO_TRUNCATION = Truncation()


@dataclass(frozen=True)
class SamplingParams:
    """How the engine samples: rollout_logprobs are of softmax(logits / temperature) over the tokens that `truncation` keeps."""

    temperature: float  # 0 is greedy
    max_tokens: int
    stop_token_ids: tuple[int, ...] = ()  # any of them ends a response and is part of it
    truncation: Truncation = NO_TRUNCATION


@dataclass(frozen=True)
class Dialogue:
    """What a response of several turns is besides its tokens. What others than the policy write into it (results of tools, follow-up
    messages) counts nowhere: not in the loss, nor in lengths, denominators or comparisons of log-probs."""

    written: tuple[bool, ...]  # [Lr], True on the tokens that the policy wrote
    messages: tuple[dict[str, Any], ...]  # what followed the prompt's: the policy's, the tools', the user's
    num_turns: int  # that the policy took
    ended: str  # "done", "length", "budget", "max_turns", "tool_limit" or "failed"
    rewards: dict[str, float | None] = field(default_factory=dict)  # of its turns and its environment, by column; summed with weight 1
    turn_rewards: tuple[float | None, ...] = ()  # one for each turn that was judged
    tool_calls: int = 0
    tool_failures: int = 0

    def record(self) -> dict[str, Any]:
        """Everything but the token row, for files."""
        return {name: value for name, value in vars(self).items() if name != "written"}


@dataclass(frozen=True)
class Rollout:
    """One prompt with one response as sampled. `response_ids` includes the end token when finish_reason is "stop"."""

    prompt: Prompt
    response_ids: tuple[int, ...]  # [Lr]
    rollout_logprobs: tuple[float, ...]  # [Lr], as the engine reports them; 0 where the policy wrote nothing
    finish_reason: str  # "stop" or "length": how the policy's last turn ended
    weight_version: int  # number of syncs the engine had seen when it sampled the first token
    text: str  # decoded, special tokens left out
    dialogue: Dialogue | None = None  # None: one turn, all of it the policy's
    later_versions: tuple[tuple[int, int], ...] = ()  # (first token, weight version) from there on, where syncs came in between

    @property
    def written(self) -> tuple[bool, ...]:
        """[Lr]: whether the policy wrote each token of the response."""
        return (True,) * len(self.response_ids) if self.dialogue is None else self.dialogue.written

    @property
    def length(self) -> int:
        """Tokens that the policy wrote."""
        return sum(self.written)

    @property
    def token_versions(self) -> tuple[int, ...]:
        """[Lr]: the weight version that each token was sampled with."""
        starts = [(0, self.weight_version), *self.later_versions]
        ends = [start for start, _ in starts[1:]] + [len(self.response_ids)]
        return tuple(version for (start, version), end in zip(starts, ends, strict=True) for _ in range(start, end))


@dataclass(frozen=True)
class ScoredRollout:
    """`rewards` per function, None where it could not score; `reward` is the weighted sum, NaN when no function could."""

    rollout: Rollout
    rewards: dict[str, float | None]
    reward: float


@dataclass(frozen=True)
class TrainSample:
    """A rollout turned into arrays; all [L], prompt then response."""

    token_ids: Tensor  # [L] int64
    response_mask: Tensor  # [L] bool, True on the tokens that the policy wrote
    rollout_logprobs: Tensor  # [L] float32, 0 on the others
    advantage: float
    index: int = -1  # place among the step's samples; -1 for what is no sample
    truncated: bool = False  # the response was cut at its greatest length


@dataclass(frozen=True)
class MicroBatch:
    """Sequences packed end to end. `cu_seqlens` [S + 1] are their borders; a padding tail, if any, is the last sequence with mask 0.

    A sequence is a whole sample, or a part of one: the responses to one prompt may share it. Then the prompt without its last token is a
    sequence of its own, and each sample is [last token of the prompt, response], which continues it (`prefixes`).
    """

    token_ids: Tensor  # [T] int64
    labels: Tensor  # [T] int64, token_ids of the next position, 0 at a sample's last
    position_ids: Tensor  # [T] int64, place in the sample, from 0
    cu_seqlens: Tensor  # [S + 1] int32
    loss_mask: Tensor  # [T] bool, the tokens that count: decided here and nowhere else
    advantages: Tensor  # [T] float32, constant in a sample
    rollout_logprobs: Tensor  # [T] float32
    samples: Tensor  # [S] int64, `TrainSample.index` of the sample that each sequence belongs to
    prefixes: Tensor | None = None  # [S] int64, the sequence that each one continues, or -1; None: no sequence continues another
    old_logprobs: Tensor | None = None  # [T] float32; None: the policy itself, gradient stopped
    ref_logprobs: Tensor | None = None  # [T] float32; None: no sampled KL term
    ref_head: RefHead | None = None  # what the exact KL needs of the reference; None: no exact KL term
    # What a loss needs to know of the whole step, from `look_ahead`; None: it does not.
    high_entropy: Tensor | None = None  # [T] bool, loss tokens that the policy term counts
    entropy_weights: Tensor | None = None  # [T] float32, what each token's entropy takes off the loss; the entropy then has a gradient
    slopes: Tensor | None = None  # [T] float32, the loss's derivative by each log-prob
    values: Tensor | None = None  # [T] float32, each token's part of the loss

    @property
    def num_tokens(self) -> int:
        return self.token_ids.numel()

    def with_advantages(self, of_samples: Tensor) -> MicroBatch:
        """A copy with these advantages [N] of the step's samples."""
        of_sequences = torch.where(self.samples >= 0, of_samples.float()[self.samples], 0.0)
        return replace(self, advantages=of_sequences.repeat_interleave(self.cu_seqlens.diff().long()))

    def to(self, device: torch.device) -> MicroBatch:
        moved = {k: v.to(device, non_blocking=True) for k, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, **moved)


@dataclass(frozen=True)
class RefHead:
    """Where the reference's logits of one micro-batch come from: they are computed a tile at a time, when they are needed."""

    hidden: Tensor  # [N, H] final hidden states at the loss tokens that this rank holds, in order
    weight: Tensor  # [V/tp, H] this rank's rows of the LM head that reads them


@dataclass(frozen=True)
class TrainBatch:
    """The micro-batches of this data-parallel rank, and counts over the whole step that every rank agrees on."""

    micro_batches: tuple[MicroBatch, ...]
    num_tokens: int  # loss tokens of the step, over all ranks, those of samples left out for zero advantage included
    num_sequences: int  # samples of the step, over all ranks, the same
    packing: dict[str, float] = field(default_factory=dict)  # metrics of how even the packing is, over all ranks
    samples: tuple[int, ...] = ()  # `TrainSample.index` of those samples

    def with_logprobs(self, old: list[Tensor] | None = None, ref: list[Tensor] | None = None) -> TrainBatch:
        """A copy whose micro-batches carry these old_ and ref_ log-probs, one [T] tensor per micro-batch; what is not given stays."""
        given = {name: rows for name, rows in (("old_logprobs", old), ("ref_logprobs", ref)) if rows is not None}
        return self.with_rows(**given)

    def with_ref_heads(self, heads: list[RefHead | None]) -> TrainBatch:
        """A copy whose micro-batches carry these."""
        return self.with_rows(ref_head=heads)

    def with_advantages(self, of_samples: Tensor) -> TrainBatch:
        """A copy with these advantages [N] of the step's samples."""
        return replace(self, micro_batches=tuple(m.with_advantages(of_samples) for m in self.micro_batches))

    def with_rows(self, **rows: Sequence[Any]) -> TrainBatch:
        """A copy whose micro-batches carry these, one for each micro-batch under the name of a field."""
        micro_batches = self.micro_batches
        for name, values in rows.items():
            micro_batches = tuple(replace(m, **{name: value}) for m, value in zip(micro_batches, values, strict=True))
        return replace(self, micro_batches=micro_batches)


@dataclass(frozen=True)
class LossInputs:
    """What a loss may look at, for one micro-batch: the rows of `MicroBatch` and what the policy says of them now."""

    policy_logprobs: Tensor  # [T] float32, with gradient
    entropy: Tensor  # [T] float32, with gradient where the micro-batch has `entropy_weights`
    micro_batch: MicroBatch
    full_kl: Tensor | None = None  # [T] float32, with gradient: KL to the reference over the whole vocabulary; None: not asked for


@dataclass(frozen=True)
class LossOutput:
    """`numerator` is a sum over this micro-batch; the policy divides the gradient once by the batch's global denominator.
    `metrics` are sums too: name -> (sum, count), reduced over micro-batches and ranks to sum / count; names ending in
    `/max` or `/min` are reduced by maximum or minimum and the count is ignored."""

    numerator: Tensor  # scalar float32
    metrics: dict[str, tuple[Tensor, Tensor]]


LossFn = Callable[[LossInputs], LossOutput]


@dataclass
class TrainState:
    """What a checkpoint restores besides weights and optimizer."""

    step: int = 0  # outer iterations finished
    weight_version: int = 0  # weight syncs finished
    best_step: int = 0  # of the checkpoint with the best evaluation; 0: none
    best_value: float | None = None  # of `evaluation.keep_best` there
    cursor: int = 0  # prompts drawn or passed over since the start
    pass_rates: list[tuple[int, float, int]] = field(default_factory=list)  # of the curriculum: prompt_id, pass rate, epoch of it
    skipped_steps: int = 0  # optimizer steps left out because their loss or gradient was NaN or infinite
    skipped_in_a_row: int = 0  # of those, since the last one that was taken
    mismatch_alarms: int = 0  # steps with a warning of the train/rollout mismatch
    evaluated: int = -1  # the last step after which an evaluation was finished
    first_mismatches: list[float] = field(default_factory=list)  # `token_mult_prob_error` of the run's first steps
    entropy_coef: float | None = None  # weight of the entropy bonus, where it is adaptive; None: still that of the configuration
    ahead: list[dict[str, Any]] = field(default_factory=list)  # groups that were generated ahead and not trained on, of all replicas
    last_entropy: float | None = None  # mean of the optimizer step before, over the tokens that the bonus counts
