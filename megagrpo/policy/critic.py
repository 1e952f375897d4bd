"""The critic of PPO: a model like the policy, whose head is one number per token, in the policy's layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from megagrpo.algorithms.gae import estimates, last_tokens, make_value_loss, mean_and_scale, turn_ends
from megagrpo.config import RunConfig
from megagrpo.families.hf_config import HfConfig
from megagrpo.platform.parallel.layout import Layout
from megagrpo.policy.find_nan import NonFiniteError
from megagrpo.policy.scalar_model import ScalarModel
from megagrpo.train_types import Metric, MicroBatch, TrainBatch


class Critic(ScalarModel):
    """The critic of this rank, with an optimizer of its own. Its "log-probs" are values."""

    def __init__(self, config: RunConfig, layout: Layout, hf_config: HfConfig):
        super().__init__(of_critic(config), layout, hf_config)
        self.loss_fn = make_value_loss(config.algorithm.critic.value_clip)

    def judged(self, batches: Sequence[TrainBatch]) -> tuple[list[TrainBatch], dict[str, float]]:
        """Return the batches of a step with advantages in place of rewards and with the critic's targets; and metrics.

        A micro-batch's `advantages` are rewards before: at each token that of its turn or its trajectory, which the
        last token earns. With `kl_in_reward` every token pays beta times its KL. Collective.
        """
        estimated = [self._estimated(batch) for batch in batches]
        moments = sum((self._moments(m) for batch in estimated for m in batch.micro_batches), torch.zeros(8).double())
        count, total, squares, *sums = self.layout.all_reduce(moments).tolist()
        value, target, squared_target, error, squared_error = (x / max(count, 1) for x in sums)
        metrics = {"critic/value": value, "critic/return": target}
        if (spread := squared_target - target**2) > 0:
            metrics["critic/explained_variance"] = 1 - (squared_error - error**2) / spread
        if self.config.algorithm.scale_rewards == "none":
            return estimated, metrics
        mean, scale = mean_and_scale(count, total, squares)
        scaled = partial(_whitened, mean=mean, scale=scale)
        return [_each(batch, scaled) for batch in estimated], metrics

    def _estimated(self, batch: TrainBatch) -> TrainBatch:
        """Return the batch with values, targets and unscaled advantages; unchanged outside the last stage."""
        rows = iter(self.logprobs(batch))

        def estimated(m: MicroBatch) -> MicroBatch:
            if (values := next(rows)) is None:
                return m
            m = m.to(values.device)
            found = estimates(m, self._rewards(m), values, self.config.algorithm)
            m = replace(m.with_terms(values=values, returns=found.returns), advantages=found.advantages)
            return m.to(torch.device("cpu"))

        return _each(batch, estimated)

    def _rewards(self, m: MicroBatch) -> Tensor:
        """Return what each token earns [T]."""
        algorithm = self.config.algorithm
        ends = turn_ends(m) if algorithm.advantage_by_turns else last_tokens(m)
        rewards = torch.where(ends, m.advantages, 0.0)
        if not algorithm.kl_in_reward:
            return rewards
        old, ref = m.terms.old_logprobs, m.terms.ref_logprobs
        assert old is not None and ref is not None, "the batch has no old or no reference log-probs"
        return rewards - algorithm.beta * torch.where(m.loss_mask, old - ref, 0.0)

    def learn(self, batch: TrainBatch) -> dict[str, Metric]:
        """Take one optimizer step towards the returns of the batch. Raises NonFiniteError."""
        try:
            return of_the_critic(self.train_step(batch, self.loss_fn, max(batch.num_tokens, 1)))
        except NonFiniteError as error:
            named = NonFiniteError(error.tensor, error.metrics, f" of the critic{error.about}")
            named.metrics = of_the_critic(error.metrics)
            raise named from error

    def _moments(self, m: MicroBatch) -> Tensor:
        """Return [8] float64 sums over this rank's loss tokens; 0 on ranks whose numbers another rank has."""
        values, returns = m.terms.values, m.terms.returns
        if values is None or returns is None or self.layout.tp_rank or self.layout.cp_rank:
            return torch.zeros(8).double()
        a, v, r = (row[m.loss_mask].double() for row in (m.advantages, values, returns))
        return torch.stack([row.sum() for row in (torch.ones_like(a), a, a * a, v, r, r * r, r - v, (r - v) ** 2)])


def of_the_critic(metrics: dict[str, Metric]) -> dict[str, Metric]:
    """Return the metrics of a pass of the critic by their names in a run."""
    return {name if name.startswith("critic/") else f"critic/{name}": metric for name, metric in metrics.items()}


def _each(batch: TrainBatch, change: Callable[[MicroBatch], MicroBatch]) -> TrainBatch:
    return replace(batch, micro_batches=tuple(change(m) for m in batch.micro_batches))


def _whitened(m: MicroBatch, mean: float, scale: float) -> MicroBatch:
    return replace(m, advantages=torch.where(m.loss_mask, (m.advantages - mean) / scale, 0.0))


def of_critic(config: RunConfig) -> RunConfig:
    """Return the run's config with the critic's own model and learning rate. Its routers choose experts of their own,
    and adapters of another model than the policy's are new ones."""
    own = config.algorithm.critic
    changes = dict(
        train=dict(learning_rate=own.learning_rate, min_learning_rate=0.0),
        model=dict(path=own.path or config.model.path),
        rollout=dict(routing_replay="off"),
        lora={} if own.path is None else dict(adapter_path=None),
    )
    sections = {name: getattr(config, name).model_copy(update=values) for name, values in changes.items()}
    return config.model_copy(update=sections)
