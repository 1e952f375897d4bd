"""The GRPO loop. `Trainer.step` is the algorithm; each of its parts is a file of this folder."""

from __future__ import annotations

from dataclasses import dataclass

from megagrpo.algorithms.advantages import reward_statistics
from megagrpo.config import RunConfig
from megagrpo.records.rows.recorder import TrainedRollouts
from megagrpo.records.rows.step_metrics import reduce_updates
from megagrpo.train_types import TrainState
from megagrpo.trainer.gpu.gpu_sharing import GpuTurns
from megagrpo.trainer.lifecycle import Lifecycle
from megagrpo.trainer.loop import Loop
from megagrpo.trainer.policy_update import Learning
from megagrpo.trainer.recording import Records
from megagrpo.trainer.rollout.groups import Rollouts
from megagrpo.trainer.rollout.roles import role_metrics
from megagrpo.trainer.rollout.sample_metrics import rollout_metrics, task_metrics
from megagrpo.trainer.syncing import Syncing


@dataclass
class Trainer(Loop):
    """The parts of a run, and its training loop. `state` is what a checkpoint restores; the parts share it."""

    config: RunConfig
    state: TrainState
    turns: GpuTurns
    rollouts: Rollouts
    learning: Learning
    syncing: Syncing
    records: Records
    lifecycle: Lifecycle

    def step(self) -> dict[str, float]:
        """Run one training step. Returns its metrics, the same on every rank. Raises StopRequested before training."""
        algorithm, learning, recorders = self.config.algorithm, self.learning, self.records.recorders
        with self.turns.generating():
            self.records.start_clocks(f"step {self.state.step + 1}/{self.config.run.num_steps} ")
            samples, metrics = self.rollouts.draw()
        with self.turns.training():
            advantages = learning.advantages(samples)
            of_turns = learning.turn_advantages(samples, advantages)
            batches = learning.batches(samples, advantages, of_turns)
            batches, advantages, of_turns, judged = learning.judged(batches, advantages, of_turns)
            metrics |= judged
            if algorithm.kl_in_reward and not algorithm.has_critic:
                advantages, batches, metrics["kl"] = learning.with_kl_in_reward(samples, batches)
            trained = TrainedRollouts(self.state.step + 1, samples, advantages.tolist(), of_turns)
            updates = []
            recorders.begin(trained)
            for batch in batches * algorithm.num_iterations:
                with learning.update(batch) as update:
                    update.metrics = learning.teach_critic(update.batch)
                    if learning.teaches_policy:
                        gradients = learning.policy.backward(update.batch, update.loss_fn, update.denominator)
                        update.metrics |= gradients | learning.policy.update()
                updates.append(update.metrics)
            learning.policy.finish_updates()
            metrics |= reduce_updates(updates) | reduce_updates([batch.packing for batch in batches])
            # also frees the reference's hidden states, which are not needed while servers generate
            del batches, batch, update
            recorders.after_training(trained)
            learning.move_reference()
        self.syncing.sync()
        recorders.finish(trained)
        rewards = samples.rewards(group := self.config.rollout.num_generations)
        of_tasks = task_metrics(samples, group, [task.name for task in self.config.tasks])
        of_tasks |= role_metrics(samples, learning.roles(samples), group)
        return metrics | reward_statistics(rewards) | rollout_metrics(samples) | of_tasks

    @property
    def synced(self) -> dict[str, float]:
        """Metrics of the last weight sync."""
        return self.syncing.metrics

    def advance(self) -> None:
        """Count the step as finished."""
        self.rollouts.advance()

    def run(self) -> int:
        """Push the weights to the engine, then run the loop; see `Loop.run`."""
        self.syncing.sync()
        return super().run()
