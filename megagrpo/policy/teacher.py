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
from megagrpo.train_types import MicroBatch, OtherHead, RefHead, TeacherTerm, TrainBatch


@dataclass(frozen=True)
class Teacher:
    """A frozen model with weights of its own, its divergence, and its weight at each step, counted from 1."""

    name: str
    model: MegatronPolicy
    divergence: str
    mix: float
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
        plain = replace(batch, micro_batches=tuple(replace(m, routes=None) for m in batch.micro_batches))
        pairs = zip(batch.micro_batches, self.model.heads(plain), strict=True)
        return batch.with_terms(
            teachers=[m.terms.teachers if head is None else self._terms(m, head, weight) for m, head in pairs]
        )

    def _terms(self, micro_batch: MicroBatch, head: RefHead, weight: float) -> tuple[TeacherTerm, ...]:
        weights = micro_batch.advantages.new_full((micro_batch.num_tokens,), weight)
        other = OtherHead(head, self.divergence, self.mix)
        return *micro_batch.terms.teachers, TeacherTerm(self.name, weights, other)


def build_teachers(config: RunConfig, layout: Layout, shapes: Sequence[HfConfig]) -> Iterator[Teacher]:
    """Yield the teachers of a run, with models of these shapes that the caller fills. Their options are those of the
    run without what only a trained model needs."""
    rollout = config.rollout.model_copy(update={"routing_replay": "off"})
    for (name, section), shape in zip(config.algorithm.teachers.items(), shapes, strict=True):
        model = ModelSection(path=section.path or config.model.path, precision=config.model.precision)
        own = {"model": model, "lora": LoraSection(), "algorithm": AlgorithmSection(), "rollout": rollout}
        scoring = MegatronPolicy(config.without_overlap.model_copy(update=own), layout, shape, frozen=True)
        yield Teacher(name, scoring, section.divergence, section.mix, section.weight_at)
