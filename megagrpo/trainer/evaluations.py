"""The evaluations of a run on its held-out sets."""

from __future__ import annotations

from dataclasses import dataclass

from megagrpo.config import EvaluationSection, RunSection
from megagrpo.trainer.callbacks import Callbacks
from megagrpo.trainer.evaluation.sets import HeldOut, evaluate
from megagrpo.trainer.gpu_turns import GpuTurns
from megagrpo.trainer.recording import Records
from megagrpo.trainer.rollout.collector import Collector
from megagrpo.trainer.saves import Saves
from megagrpo.types import TrainState


@dataclass
class Evaluations:
    """Scores responses to the held-out prompts. All methods are collective."""

    held_out: list[HeldOut]
    section: EvaluationSection
    run: RunSection
    state: TrainState
    collector: Collector
    turns: GpuTurns
    records: Records
    callbacks: Callbacks
    saves: Saves

    def evaluate_if_due(self) -> None:
        """Evaluate before the first step, after the last and every `evaluation.steps`, once for each of these steps."""
        step, every = self.state.step, self.section.steps
        due = step in (0, self.run.num_steps) or (every and step % every == 0)
        if due and self.held_out and self.state.evaluated != step:
            self.evaluate()

    def evaluate(self) -> None:
        """Evaluate every set. With `evaluation.keep_best`, save a checkpoint when the result is the best so far."""
        self.records.phases.about = "evaluation: "
        with self.turns.generating():
            metrics = evaluate(self.held_out, self.collector.collect, self.run.seed)
        self.records.writer.evaluation(self.state.step, metrics)
        self.state.evaluated = self.state.step
        self.callbacks.evaluated(metrics)
        if self.section.keep_best is not None:
            self.saves.save_if_best(self.section.keep_best, metrics)
