"""A teacher: a model that the policy is compared with on its own responses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from types import MappingProxyType
from typing import Protocol

from torch import Tensor

from megagrpo.config import AlgorithmSection, LoraSection, ModelSection, RunConfig, TeacherSection
from megagrpo.families.hf_config import HfConfig
from megagrpo.platform.parallel.context import rank_indices
from megagrpo.policy.megatron_policy import MegatronPolicy
from megagrpo.policy.reference import Reference
from megagrpo.train_types import (
    MicroBatch,
    OtherHead,
    Reading,
    RefHead,
    StepTerms,
    TeacherTerm,
    TopLogprobs,
    TrainBatch,
)

Answer = OtherHead | Tensor  # of a micro-batch: distributions, or the log-probs [T] of its labels
EXCLUDED = -9000.0  # of a token that a model excludes; vLLM sends -9999 for -inf


class Server(Protocol):
    """A teacher behind servers, for which `heads` do not exist."""

    def logprobs(self, batch: TrainBatch) -> list[Tensor | None]: ...

    def top_logprobs(self, batch: TrainBatch, k: int) -> list[TopLogprobs | None]: ...


@dataclass(frozen=True)
class Teacher:
    """A frozen model in the policy's layout, with weights of its own, or the run's policy or reference."""

    name: str
    model: MegatronPolicy | Reference | Server
    section: TeacherSection
    policy: MegatronPolicy
    times_moved: int = 0  # no step changes it

    @property
    def shares_prompts(self) -> bool:
        """Whether the samples of a batch may share one copy of their prompt."""
        return not isinstance(self.model, MegatronPolicy) or self.model.shares_prompts

    @property
    def weights(self) -> list[Tensor]:
        """This rank's weights that are the teacher's alone."""
        if not isinstance(self.model, MegatronPolicy) or self.section.is_own:
            return []
        return [*chain.from_iterable((*chunk.parameters(), *chunk.buffers()) for chunk in self.model.chunks)]

    def annotate(self, batch: TrainBatch, step: int) -> TrainBatch:
        """Return the batch with the inputs of this teacher's term at `step`; unchanged where its weight is 0.
        Collective."""
        weight = self.section.weight_at(step)
        if not weight:
            return batch
        read = [m.readings.get(self.name) for m in batch.micro_batches]
        own = [m if one is None else one.micro_batch for m, one in zip(batch.micro_batches, read, strict=True)]
        plain = replace(batch, micro_batches=tuple(replace(m, routes=None, terms=StepTerms()) for m in own))
        triples = zip(batch.micro_batches, read, self._answers(plain, any(read)), strict=True)
        return batch.with_terms(
            teachers=[m.terms.teachers if a is None else self._terms(m, one, a, weight) for m, one, a in triples]
        )

    def _answers(self, batch: TrainBatch, whole: bool) -> Sequence[Answer | None]:
        """Return what the teacher says of each micro-batch; None outside the last pipeline stage. `whole`: the hidden
        states of all context-parallel ranks."""
        section = self.section
        if section.over == "sampled":
            return self.model.logprobs(batch)
        heads: Sequence[RefHead | TopLogprobs | None]
        if isinstance(section.over, int):
            model = self.model if isinstance(self.model, MegatronPolicy) else self.policy
            heads = self.model.top_logprobs(batch, min(section.over, model.hf_config.vocab_size))
        else:
            heads = self._heads(batch, whole)
        return [None if head is None else OtherHead(head, section.divergence, section.mix) for head in heads]

    def _heads(self, batch: TrainBatch, whole: bool) -> list[RefHead | None]:
        assert isinstance(self.model, MegatronPolicy | Reference), "config rules: a server sends no hidden states"
        heads = self.model.heads(batch, whole)
        if not self.section.is_own or self.policy.config.algorithm.updates_per_step == 1:
            return heads
        # a copy, because the policy moves; all heads have one weight
        weight = next((head.weight.clone() for head in heads if head is not None), None)
        return [None if head is None or weight is None else replace(head, weight=weight) for head in heads]

    def _terms(self, m: MicroBatch, reading: Reading | None, answer: Answer, weight: float) -> tuple[TeacherTerm, ...]:
        weights = m.advantages.new_full((m.num_tokens,), weight)
        if reading is not None:
            weights, answer = weights * reading.tokens, self._placed(m, reading, answer)
        if isinstance(answer, Tensor):
            weights = weights.to(answer.device) * (answer > EXCLUDED)
            return *m.terms.teachers, TeacherTerm(self.name, weights, logprobs=answer.clamp(min=EXCLUDED))
        return *m.terms.teachers, TeacherTerm(self.name, weights, answer)

    def _placed(self, m: MicroBatch, reading: Reading, answer: Answer) -> Answer:
        """Return an answer about the teacher's micro-batch as one about the policy's; 0 at other tokens."""
        mask = reading.micro_batch.loss_mask

        def spread(rows: Tensor, size: int, tokens: Tensor) -> Tensor:
            return rows.new_zeros(size, *rows.shape[1:]).index_copy(0, tokens.nonzero()[:, 0].to(rows.device), rows)

        if isinstance(answer, Tensor):
            return spread(answer[mask.to(answer.device)], m.num_tokens, reading.tokens)
        if isinstance(head := answer.head, TopLogprobs):
            rows = (row[mask.to(row.device)] for row in (head.logprobs, head.token_ids))
            return replace(answer, head=TopLogprobs(*(spread(row, m.num_tokens, reading.tokens) for row in rows)))
        layout, states = self.policy.layout, spread(head.hidden, m.num_tokens, reading.tokens)
        tokens = rank_indices(m.cu_seqlens, layout.parallel.cp, layout.cp_rank)
        own = tokens[m.loss_mask[tokens]].to(states.device)
        return replace(answer, head=replace(head, hidden=states[own]))


def build_teachers(
    config: RunConfig,
    policy: MegatronPolicy,
    reference: Reference | None,
    shapes: Sequence[HfConfig | None],
    served: Mapping[str, Server] = MappingProxyType({}),
) -> Iterator[Teacher]:
    """Yield the teachers of a run, with models of these shapes that the caller fills; None: the policy, the reference
    or one of `served`. Their options are those of the run without what only a trained model needs."""
    rollout = config.rollout.model_copy(update={"routing_replay": "off"})
    for (name, section), shape in zip(config.algorithm.teachers.items(), shapes, strict=True):
        if shape is None:
            own = served.get(name) or (reference if section.path == "reference" else policy)
            assert own is not None, "AlgorithmSection.has_reference knows the teachers"
            yield Teacher(name, own, section, policy)
            continue
        model = ModelSection(path=section.path or config.model.path, precision=config.model.precision)
        update = {"model": model, "lora": LoraSection(), "algorithm": AlgorithmSection(), "rollout": rollout}
        scoring = MegatronPolicy(config.without_overlap.model_copy(update=update), policy.layout, shape, frozen=True)
        yield Teacher(name, scoring, section, policy)
