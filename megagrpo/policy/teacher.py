"""A teacher: a second model, in the policy's layout, that the policy is compared with on its own responses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from torch import Tensor

from megagrpo.config import AlgorithmSection, LoraSection, ModelSection, RunConfig
from megagrpo.families.hf_config import HfConfig
from megagrpo.platform.parallel.layout import Layout
from megagrpo.policy.megatron_policy import MegatronPolicy
from megagrpo.train_types import MicroBatch, OtherHead, RefHead, RefTop, StepTerms, TeacherTerm, TrainBatch


@dataclass(frozen=True)
class Teacher:
    """A frozen model with weights of its own, its divergence, and its weight at each step, counted from 1."""

    name: str
    model: MegatronPolicy
    divergence: str
    mix: float
    over: str | int
    weight_at: Callable[[int], float]
    times_moved: int = 0  # no step changes it

    @property
    def weights(self) -> list[Tensor]:
        """This rank's weights."""
        chunks = self.model.chunks
        return [*chain.from_iterable((*chunk.parameters(), *chunk.buffers()) for chunk in chunks)]

    def annotate(self, batch: TrainBatch, step: int) -> TrainBatch:
        """Return the batch with the inputs of this teacher's term at `step`; unchanged where its weight is 0.
        Collective."""
        weight = self.weight_at(step)
        if not weight:
            return batch
        micro_batches = tuple(replace(m, routes=None, terms=StepTerms()) for m in batch.micro_batches)
        plain = replace(batch, micro_batches=micro_batches)
        pairs = zip(batch.micro_batches, self._answers(plain), strict=True)
        return batch.with_terms(
            teachers=[m.terms.teachers if answer is None else self._terms(m, answer, weight) for m, answer in pairs]
        )

    def _answers(self, batch: TrainBatch) -> Sequence[OtherHead | Tensor | None]:
        """Return what the teacher says of each micro-batch; None outside the last pipeline stage."""
        if self.over == "sampled":
            return self.model.logprobs(batch)
        heads: Sequence[RefHead | RefTop | None] = (
            self._tops(batch, self.over) if isinstance(self.over, int) else self.model.heads(batch)
        )
        return [None if head is None else OtherHead(head, self.divergence, self.mix) for head in heads]

    def _tops(self, batch: TrainBatch, k: int) -> list[RefTop | None]:
        k = min(k, self.model.hf_config.vocab_size)
        tops = self.model.top_logprobs(batch, k)
        return [None if top is None else RefTop(top.logprobs, top.token_ids) for top in tops]

    def _terms(self, micro_batch: MicroBatch, answer: OtherHead | Tensor, weight: float) -> tuple[TeacherTerm, ...]:
        weights = micro_batch.advantages.new_full((micro_batch.num_tokens,), weight)
        if isinstance(answer, Tensor):
            return *micro_batch.terms.teachers, TeacherTerm(self.name, weights, logprobs=answer)
        return *micro_batch.terms.teachers, TeacherTerm(self.name, weights, answer)


def build_teachers(config: RunConfig, layout: Layout, shapes: Sequence[HfConfig]) -> Iterator[Teacher]:
    """Yield the teachers of a run, with models of these shapes that the caller fills. Their options are those of the
    run without what only a trained model needs."""
    rollout = config.rollout.model_copy(update={"routing_replay": "off"})
    for (name, section), shape in zip(config.algorithm.teachers.items(), shapes, strict=True):
        model = ModelSection(path=section.path or config.model.path, precision=config.model.precision)
        own = {"model": model, "lora": LoraSection(), "algorithm": AlgorithmSection(), "rollout": rollout}
        scoring = MegatronPolicy(config.without_overlap.model_copy(update=own), layout, shape, frozen=True)
        yield Teacher(name, scoring, section.divergence, section.mix, section.over, section.weight_at)
