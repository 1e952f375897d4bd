"""The loop of the methods that learn from the responses of rows: no engine, no rewards, one optimizer step a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import batched

import numpy as np
from torch import Tensor

from megagrpo.algorithms.preference_losses import of_step
from megagrpo.algorithms.reductions import denominator
from megagrpo.config import AlgorithmSection
from megagrpo.data.examples import Answer, Example
from megagrpo.data.packing.step_samples import StepSamples
from megagrpo.data.sources.prompt_order import PromptOrder
from megagrpo.platform.parallel.layout import Layout
from megagrpo.policy.metric_sums import merged
from megagrpo.policy.reference import sums_by_sample
from megagrpo.records.rows.recorder import TrainedRollouts
from megagrpo.records.rows.step_metrics import reduce_updates, values_of
from megagrpo.train_types import LossFn, Metric, TrainBatch, TrainState
from megagrpo.trainer.lifecycle import Evaluations, Lifecycle
from megagrpo.trainer.loop import Loop
from megagrpo.trainer.policy_update import Learning
from megagrpo.trainer.recording import Records
from megagrpo.trainer.rollout.collector import Collector
from megagrpo.trainer.rollout.sample_metrics import rollout_metrics
from megagrpo.types import Dialogue, Prompt, Rollout, SamplingParams, ScoredRollout


class RowCollector(Collector):
    """A collector whose rollouts are the responses of the rows: nothing is generated or scored."""

    def _scored(
        self, prompts: Sequence[Prompt], n: int, sampling: SamplingParams, seed: int, ahead: bool
    ) -> tuple[list[ScoredRollout], dict[str, float]]:
        examples = [prompt for prompt in prompts if isinstance(prompt, Example)]
        return [_rollout(example, answer) for example in examples for answer in example.answers], {}


def _rollout(example: Example, answer: Answer) -> ScoredRollout:
    """Return a response of a row as a rollout, whose reward is the value of the response."""
    written, unknown = np.array(answer.written), np.zeros(len(answer.token_ids), np.float32)
    dialogue = None if written.all() else Dialogue(written, (), (), "done")
    rollout = Rollout(example, np.array(answer.token_ids), unknown, "stop", 0, answer.text, dialogue)
    return ScoredRollout(rollout, {}, answer.value)


@dataclass
class Rows:
    """Draws the rows of each step and packs them. `group` is the number of responses of a row. Collective."""

    prompts: PromptOrder
    collector: RowCollector
    learning: Learning
    group: int

    def collect(self, prompts: Sequence[Prompt]) -> StepSamples:
        """Return the responses of these rows; each replica reads its share."""
        with self.learning.phases("read"):
            return self.collector.collect(prompts, self.group, self.learning.policy.sampling, 0)[0]

    def batch(self, samples: StepSamples) -> TrainBatch:
        """Pack the responses; their values take the place of advantages. Adds the reference's log-probs, if any."""
        values, learning = samples.rewards(self.group).flatten(), self.learning
        (batch,) = learning.batches(samples, values)
        if (algorithm := learning.config.algorithm).loss.whole_step:
            batch = with_step_values(batch, algorithm, learning.policy.layout, values)
        return batch


def with_step_values(batch: TrainBatch, algorithm: AlgorithmSection, layout: Layout, values: Tensor) -> TrainBatch:
    """Return the batch with what its loss knows of the whole step in place of the values [N]. Collective."""
    return batch.with_advantages(of_step(algorithm, sums_by_sample([batch], layout), values))


@dataclass
class RowLoop(Loop):
    """The parts of a run on rows, and its training loop. `state` is what a checkpoint restores; the parts share it."""

    state: TrainState
    rows: Rows
    learning: Learning
    records: Records
    lifecycle: Lifecycle
    export: Callable[[], None]  # writes the trained model

    def run(self) -> int:
        """Run the loop, see `Loop.run`, and after its last step write the trained model."""
        stopped_by = super().run()
        if not stopped_by:
            self.export()
        return stopped_by

    def step(self) -> dict[str, float]:
        """Run one training step. Returns its metrics, the same on every rank. Raises StopRequested before training."""
        learning, recorders, config = self.learning, self.records.recorders, self.learning.config
        self.records.start_clocks(f"step {self.state.step + 1}/{config.run.num_steps} ")
        samples = self.rows.collect(self.rows.prompts.next(config.rollout.prompts_per_step))
        batch = self.rows.batch(samples)
        trained = TrainedRollouts(self.state.step + 1, samples, samples.facts["reward"].tolist())
        recorders.begin(trained)
        with learning.update(batch) as update:
            gradients = learning.policy.backward(update.batch, update.loss_fn, update.denominator)
            update.metrics = gradients | learning.policy.update()
        learning.policy.finish_updates()
        recorders.after_training(trained)
        recorders.finish(trained)
        return reduce_updates([update.metrics | batch.packing]) | rollout_metrics(samples)

    def advance(self) -> None:
        """Count the step as finished."""
        self.state.step += 1
        self.rows.prompts.store(self.state)
        self.rows.collector.step = self.state.step


@dataclass
class RowEvaluations(Evaluations):
    """Computes the loss on held-out rows: `sets` by name, read by `rows`."""

    sets: dict[str, PromptOrder] = field(default_factory=dict)
    rows: Rows | None = None
    loss_fn: LossFn | None = None

    @property
    def has_sets(self) -> bool:
        """Whether there are held-out sets."""
        return bool(self.sets)

    def measure(self) -> dict[str, float]:
        """Return the metrics of the loss over all rows of every set, prefixed `NAME/`."""
        metrics: dict[str, float] = {}
        for name, order in self.sets.items():
            of_set = self._of_set(order)
            metrics |= {f"{name}/{key}" if name else key: value for key, value in values_of(of_set).items()}
        return metrics

    def _of_set(self, order: PromptOrder) -> dict[str, Metric]:
        assert self.rows is not None and self.loss_fn is not None, "the wiring sets both"
        learning, parts = self.rows.learning, list[dict[str, Metric]]()
        algorithm, rollout = learning.config.algorithm, learning.config.rollout
        for prompts in batched(order.all(), rollout.prompts_per_step):
            batch = self.rows.batch(self.rows.collect(prompts))
            found = learning.policy.losses(batch, self.loss_fn)
            divisor = denominator(batch, algorithm.loss.average, rollout.max_completion_length)
            parts.append(found | {"loss": Metric(found["loss"].sum, divisor)})
        return merged(parts)
