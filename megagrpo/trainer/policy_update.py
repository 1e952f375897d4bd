"""The learning part of a step: rollouts become packed batches with log-probs, and these become optimizer steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from megagrpo.algorithms.advantages import advantages_of, charged_kl, less_kl
from megagrpo.algorithms.custom_advantage import Groups, checked, imported
from megagrpo.algorithms.entropy import adapt_bonus, bonus_coefficient
from megagrpo.algorithms.reductions import denominator, loss_weights
from megagrpo.algorithms.turn_advantages import Turns, discounted_returns, turn_advantages
from megagrpo.config import RunConfig
from megagrpo.data.packing.readings import with_readings
from megagrpo.data.packing.sample_packing import PackPlan, build_batch, packing_rules, plan_packing, slices
from megagrpo.data.packing.sample_table import TRUNCATED
from megagrpo.data.packing.step_samples import StepSamples
from megagrpo.data.tokens.grammar import grammars_of
from megagrpo.engine.http.protocol import derive_seed
from megagrpo.platform.parallel.agree import run_own_and_agree
from megagrpo.platform.parallel.layout import Layout
from megagrpo.platform.process.phases import Phases
from megagrpo.platform.process.progress_hook import Progress
from megagrpo.policy.critic import Critic
from megagrpo.policy.find_nan import NonFiniteError
from megagrpo.policy.images.image_inputs import ImageInputs, ModelInputs, build_tower
from megagrpo.policy.megatron_policy import MegatronPolicy
from megagrpo.policy.moe.routing_replay import route_shape
from megagrpo.policy.reference import Reference, kl_by_sample, sums_by_sample
from megagrpo.policy.step_terms import add_step_terms
from megagrpo.policy.teacher import Teacher
from megagrpo.records.rows.recorder import Recorder, Update
from megagrpo.records.rows.step_metrics import values_of
from megagrpo.sync.trainer_side.transport import Weights
from megagrpo.train_types import LossFn, Metric, TrainBatch, TrainState
from megagrpo.trainer.engine_side import as_config_errors
from megagrpo.trainer.rollout.roles import Role, role_advantages, roles_of, trained_members
from megagrpo.trainer.rollout.routed_experts_exchange import replayed_batches
from megagrpo.trainer.rollout.token_exchange import trained_samples
from megagrpo.trainer.run_inputs import ModelFiles
from megagrpo.types import SamplingParams
from megagrpo.weights.blocks.parameter_blocks import adapter_blocks, merged_blocks
from megagrpo.weights.bridge.adapter_files import fill_adapters
from megagrpo.weights.bridge.load import Checkpoint, load_hf


@dataclass
class Learning:
    """The policy with its reference and its loss. All methods are collective. `count_skip` gets the error of each
    skipped optimizer step, and the weights."""

    config: RunConfig
    policy: MegatronPolicy
    reference: Reference | None
    loss_fn: LossFn
    state: TrainState
    recorder: Recorder
    phases: Phases
    count_skip: Callable[[NonFiniteError, Weights], None]
    teachers: Sequence[Teacher] = ()
    critic: Critic | None = None

    def weights(self) -> Weights:
        """Yield this rank's parameters, each with the part of the Hugging Face tensor it holds: the adapters if only
        these are synced, else whole weights."""
        blocks = adapter_blocks if self.config.lora.syncs_adapters else merged_blocks
        return blocks(self.policy.chunks, self.policy.hf_config, self.policy.layout)

    def advantages(self, samples: StepSamples, kl: Tensor | None = None) -> Tensor:
        """Return the advantages [N] float64 of samples in prompt order, whose rewards pay `algorithm.beta` times the
        `kl` [P, G], if any. With roles those of all samples [N + M], from the rewards of their roles."""
        algorithm, group = self.config.algorithm, self.config.rollout.num_generations
        rewards = samples.outcomes(group)
        rewards = rewards if kl is None else less_kl(rewards, kl, algorithm.beta)
        if samples.columns.roles:
            return torch.from_numpy(role_advantages(samples, self.roles(samples), group, self._advantages))
        table = self._advantages(samples, rewards, samples.rewards_by_function(group))
        return table[samples.in_groups(group)]

    def roles(self, samples: StepSamples) -> list[Role]:
        """Return the roles of an agent in the samples, if any."""
        rewards, tasks = self.config.all_rewards, self.config.each_task
        weights = {name: each.weight for name, each in zip(rewards.names, rewards.functions, strict=True)}
        listed = {task.name: task.config.multi_turn.roles for task in tasks}
        return roles_of(samples, self.config.rollout.num_generations, weights, listed)

    def _advantages(self, samples: StepSamples, rewards: Tensor, by_function: Tensor) -> Tensor:
        """Return the advantages [P, G] float64 of rewards [P, G], and of those by function [P, G, F]."""
        algorithm, group = self.config.algorithm, self.config.rollout.num_generations
        weights = [function.weight for function in self.config.all_rewards.functions]
        if algorithm.has_critic:
            return rewards.nan_to_num(nan=0.0)
        if algorithm.own_estimator and samples.turns is None:
            return self._estimated(samples, rewards, by_function, None)
        advantages = torch.empty_like(rewards)
        for of_task in samples.groups_of_tasks(group).values():  # statistics of the batch are those of a task
            own = rewards[of_task], by_function[of_task]
            advantages[of_task] = advantages_of(*own, algorithm, weights)
        return advantages

    def turn_advantages(self, samples: StepSamples, advantages: Tensor) -> np.ndarray | None:
        """Return the advantages [K] float64 of the turns of samples with advantages [N]; None if all tokens of a
        sample have its advantage."""
        if samples.turns is None:
            return None
        algorithm, group = self.config.algorithm, self.config.rollout.num_generations
        rewards, states = (np.ascontiguousarray(samples.turns[name]) for name in ("reward", "state"))
        turns = Turns(rewards, samples.turn_owners()[0], states)
        if algorithm.has_critic:
            return discounted_returns(turns, samples.facts["reward"], discount=0.0)
        if algorithm.own_estimator:
            return self._estimated(samples, samples.rewards(group), samples.rewards_by_function(group), turns).numpy()
        groups = samples.groups(group)
        return turn_advantages(turns, samples.facts["reward"], advantages.numpy(), groups, algorithm)

    def _estimated(self, samples: StepSamples, rewards: Tensor, of_groups: Tensor, turns: Turns | None) -> Tensor:
        """Return the advantages of the user's own function, [P, G] or of turns [K]. Rank 0 calls it, so that all ranks
        have the same numbers whatever it computes. Collective."""
        algorithm, layout = self.config.algorithm, self.policy.layout
        by_function = dict(zip(samples.columns.rewards, of_groups.unbind(-1), strict=True))
        group, columns = self.config.rollout.num_generations, (samples.written, samples.has(TRUNCATED))
        lengths, truncated = (samples.by_group(column, group, missing=0) for column in columns)
        groups = Groups(rewards, by_function, lengths, truncated, turns)

        def estimated() -> Tensor:
            if layout.world_rank == 0:
                return checked(imported(algorithm.advantage_estimator), groups, algorithm)
            return torch.zeros(rewards.shape if turns is None else turns.rewards.shape, dtype=torch.float64)

        return layout.all_reduce(run_own_and_agree(layout, estimated))

    def batches(self, samples: StepSamples, advantages: Tensor, of_turns: np.ndarray | None = None) -> list[TrainBatch]:
        """Pack the samples with advantages [N], turns with advantages [K] if any, and log-probs: this replica's part
        of each optimizer step."""
        layout, seed = self.policy.layout, derive_seed(self.config.run.seed, self.state.step, "slices")
        shares = self.policy.shares_prompts and all(teacher.shares_prompts for teacher in self.teachers)
        rules = packing_rules(self.config, shares)
        shapes = samples.shapes(advantages.numpy(), rules, of_turns)
        parts = slices(len(samples), self.config.algorithm.steps_per_generation, seed)
        roles = self.roles(samples)
        members = [trained_members(samples, roles, part) for part in parts]
        plans = [plan_packing(shapes, rules, layout.dp_size, part) for part in members]
        mine = trained_samples(samples.every, plans, layout)
        if of_turns is not None:
            mine = samples.with_turn_advantages(mine, of_turns)
        elif samples.columns.token_advantages:
            mine = samples.with_token_advantages(mine, advantages.numpy())
        batches = [build_batch(plan, layout.dp_rank, mine, rules) for plan in plans]
        if self.teachers:
            pairs = zip(batches, plans, strict=True)
            batches = [with_readings(batch, plan, layout.dp_rank, mine, rules) for batch, plan in pairs]
        if self.config.rollout.routing_replay == "engine":
            batches = replayed_batches(batches, samples.every, plans, layout, route_shape(self.policy.hf_config))
        if self.config.weighs_tasks:
            batches = [self._weighed(batch, samples, plan) for batch, plan in zip(batches, plans, strict=True)]
        return [self.with_logprobs(batch) for batch in batches]

    def _weighed(self, batch: TrainBatch, samples: StepSamples, plan: PackPlan) -> TrainBatch:
        """Return the batch with the loss weights of the tasks."""
        algorithm, factors = self.config.algorithm, {task.name: task.loss_weight for task in self.config.each_task}
        members, shapes = plan.samples, plan.shapes
        tasks = [samples.every.prompts[i].task for i in members.tolist()]
        responses = Counter(tasks[k] for k in first_of_each(samples.trajectories[members]))
        prompts = {task: count / self.config.group_sizes[task] for task, count in responses.items()}
        if algorithm.loss.average == "tokens":
            parts = Counter[str]()
            for task, tokens in zip(tasks, shapes.num_loss[members].tolist(), strict=True):
                parts[task] += tokens
        else:
            owners = members if shapes.trajectories is None else shapes.trajectories[members]
            parts = Counter(tasks[k] for k in first_of_each(owners))
        weights = loss_weights(parts, prompts, factors, algorithm.loss_share_of_tasks)
        of_samples = torch.zeros(len(samples.every))
        of_samples[torch.from_numpy(members)] = torch.tensor([weights.get(task, 0.0) for task in tasks])
        return batch.with_terms(loss_weights=[m.spread(m.samples, of_samples) for m in batch.micro_batches])

    def with_logprobs(self, batch: TrainBatch) -> TrainBatch:
        """Add log-probs (float32 [T] per micro-batch): old ones when the policy changes before their use, reference
        ones for the KL term. A KL in the reward and a loss that compares the whole step need both. With
        `routing_replay: trainer` the pass for the old ones records the routes of all later passes. None are added while
        only the critic learns, from rewards alone."""
        algorithm = self.config.algorithm
        if not (self.teaches_policy or algorithm.kl_in_reward):
            return batch
        with self.phases("logprobs"):
            if self.config.rollout.routing_replay == "trainer":
                batch = self.policy.replay.recorded(batch, self.policy.logprobs)
            elif algorithm.updates_per_step > 1 or algorithm.kl_in_reward or algorithm.loss.whole_step:
                batch = batch.with_terms(old_logprobs=self.policy.logprobs(batch))
            batch = batch if self.reference is None or not algorithm.beta else self.reference.annotate(batch)
            for teacher in self.teachers:
                batch = teacher.annotate(batch, self.state.step + 1)
            return batch

    def with_kl_in_reward(
        self, samples: StepSamples, batches: list[TrainBatch]
    ) -> tuple[Tensor, list[TrainBatch], float]:
        """Subtract beta times each response's KL from its reward. Returns the new advantages [N] float64, the
        batches with these advantages, and the mean KL."""
        group, mask_truncated = self.config.rollout.num_generations, self.config.algorithm.mask_truncated_completions
        kl = samples.by_group(kl_by_sample(batches, self.policy.layout), group, missing=0)
        truncated = samples.by_group(samples.has(TRUNCATED), group, missing=True)
        kl = charged_kl(truncated, kl, mask_truncated)
        advantages = self.advantages(samples, kl)
        mean = kl[samples.in_groups(group)].mean().item()
        return advantages, [batch.with_advantages(advantages) for batch in batches], mean

    @contextmanager
    def update(self, batch: TrainBatch) -> Iterator[Update]:
        """Prepare one optimizer step on the batch, and record its metrics. A step is skipped when its loss or gradient
        is not finite; metrics of the optimizer are missing then."""
        algorithm = self.config.algorithm
        divisor = denominator(batch, algorithm.loss.average, self.config.rollout.max_completion_length)
        entropy_coef = bonus_coefficient(self.state, algorithm)
        with self.phases("logprobs"):
            batch = add_step_terms(batch, self.policy, divisor, entropy_coef)
        update = Update(batch, self.recorder.wrap_loss(self.loss_fn), divisor)
        with self.phases("train"):
            try:
                yield update
                self.state.skipped_in_a_row = 0
            except NonFiniteError as error:
                update.metrics = error.metrics
                self.count_skip(error, self.weights())
        if algorithm.entropy_bonus:
            update.metrics["entropy_coef"] = Metric(entropy_coef)
            adapt_bonus(self.state, values_of(update.metrics), algorithm)
        self.recorder.after_update(update)

    def judged(
        self, batches: list[TrainBatch], advantages: Tensor, of_turns: np.ndarray | None
    ) -> tuple[list[TrainBatch], Tensor, np.ndarray | None, dict[str, float]]:
        """Return the batches with the critic's advantages in place of their rewards, the mean advantage [N] of each
        trajectory's tokens, and the critic's metrics; without a critic what is given. Collective."""
        if self.critic is None:
            return batches, advantages, of_turns, {}
        with self.phases("critic"):
            judged, metrics = self.critic.judged(batches)
        layout = self.policy.layout
        if self.config.algorithm.kl_in_reward:
            kl, responses = kl_by_sample(judged, layout), sum(batch.num_sequences for batch in judged)
            metrics["kl"] = kl.sum().item() / max(responses, 1)
        sums, counts = sums_by_sample(judged, layout, lambda m: torch.stack([m.advantages, m.loss_mask.float()]))
        return judged, sums / counts.clamp(min=1), None, metrics

    @property
    def teaches_policy(self) -> bool:
        """Whether the policy learns in this step: not while only the critic does."""
        return self.critic is None or self.state.step >= self.config.algorithm.critic.warmup_steps

    def teach_critic(self, batch: TrainBatch) -> dict[str, Metric]:
        """Take an optimizer step of the critic, if any. Returns its metrics. Raises NonFiniteError."""
        return {} if self.critic is None else self.critic.learn(batch)

    def move_reference(self) -> None:
        """Update the reference towards the policy at the end of every `ref_model_sync_steps` steps."""
        algorithm = self.config.algorithm
        if not self.reference or not algorithm.sync_ref_model:
            return
        if (self.state.step + 1) % algorithm.ref_model_sync_steps == 0:
            self.reference.mix_in(algorithm.ref_model_mixup_alpha)


def load_policy(
    config: RunConfig,
    layout: Layout,
    model: ModelFiles,
    sampling: SamplingParams,
    progress: Progress,
    kind: type[MegatronPolicy] = MegatronPolicy,
) -> tuple[MegatronPolicy, Reference | None]:
    """Build the policy, of this class, and load its weights, and the reference's, if any. Its log-probs are over the
    distribution of `sampling`. Collective. Raises ConfigError."""
    torch.manual_seed(config.run.seed)
    hf_config, reference_folder, reference = model.hf_config, model.reference_folder, None
    with as_config_errors():
        policy = kind(config, layout, hf_config)
        policy.sampling, policy.grammars = sampling, grammars_of(config, model.folder, hf_config.vocab_size)
        if sampling.constraint is not None:  # only the last stage computes log-probs
            compile_own = partial(policy.grammars.compile, sampling.constraint)
            run_own_and_agree(layout, lambda: compile_own() if layout.is_last_stage else None)
        if reference_folder is not None:
            run_own_and_agree(layout, lambda: load_hf(policy.chunks, hf_config, reference_folder, layout, progress))
            reference = Reference(policy, whole=config.lora.enabled)

        def load() -> None:
            load_hf(policy.chunks, hf_config, model.folder, layout, progress)
            load_tower(policy, model.folder)
            if reference_folder is not None:
                check_tower(policy, reference_folder)

        run_own_and_agree(layout, load)
        fill_adapters(policy.chunks, hf_config, layout, config.lora, config.run.seed)
    policy.weights_changed()
    if reference is None and config.algorithm.has_reference:
        reference = Reference(policy)
    return policy, reference


def load_critic(config: RunConfig, layout: Layout, model: ModelFiles, progress: Progress) -> Critic:
    """Build the critic: with the weights of its own model, or the policy's first ones, and with the values of a reward
    model, or 0. Collective. Raises ConfigError."""
    own = model.critic
    one = (model.folder, model.hf_config, None) if own is None else (own.folder, own.hf_config, own.rows)
    folder, shape, rows = one

    def load() -> Tensor | None:
        try:
            return load_hf(critic.chunks, shape, folder, layout, progress, scalar=True, rows=rows)
        except ValueError as error:
            raise error if own is None else ValueError(f"algorithm.critic.path: {error}") from None

    with as_config_errors():
        critic = Critic(config, layout, shape)
        head = run_own_and_agree(layout, load)
        fill_adapters(critic.chunks, shape, layout, critic.config.lora, config.run.seed)
    critic.fill_head(torch.zeros(shape.hidden_size) if head is None else head)
    return critic


def first_of_each(owners: np.ndarray) -> list[int]:
    """Return the index of the first element of each value."""
    return np.unique(owners, return_index=True)[1].tolist()


def load_tower(policy: MegatronPolicy, folder: Path) -> None:
    """Give the policy the tower of the model in `folder`, on ranks that compute rows of images. Policies of text, and
    those with a trained tower, stay as they are. Raises ValueError when a tensor is missing or of another shape."""
    inputs: ModelInputs = policy.inputs
    if not isinstance(inputs, ImageInputs) or not inputs.reads_pixels or inputs.trains_tower:
        return
    inputs.tower = build_tower(policy.hf_config, policy.dtype)
    with torch.no_grad():
        for weight, tensor in _pairs(inputs.tower, policy, folder, "model.path").values():
            weight.copy_(tensor)


def check_tower(policy: MegatronPolicy, reference: Path) -> None:
    """Raise ValueError if the model in `reference` has another tower than the policy, which computes its images too. A
    trained tower is one of the weights of which the reference has its own."""
    inputs: ModelInputs = policy.inputs
    if not isinstance(inputs, ImageInputs) or inputs.tower is None or inputs.trains_tower:
        return
    for name, (weight, tensor) in _pairs(inputs.tower, policy, reference, "model.reference_path").items():
        if not torch.equal(weight, tensor.to(weight)):
            raise ValueError(
                f"model.reference_path: {name} in {reference} differs from the policy's, whose tower computes the "
                "images of both; name a model with the policy's tower, or leave it empty"
            )


def _pairs(tower: nn.Module, policy: MegatronPolicy, folder: Path, key: str) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the name in the files of `folder`, the weight and the stored tensor of each weight of the tower."""
    vision, checkpoint = policy.hf_config.vision, Checkpoint(folder)
    assert vision is not None, "images need a tower"
    stored, pairs = {vision.own_name(name): name for name in checkpoint.where}, {}
    for own, weight in tower.state_dict().items():
        if (name := stored.get(own)) is None:
            said = f"{folder} lacks {vision.file_name(own)}, a tensor of the tower"
            raise ValueError(f"{key}: {said}; download it again")
        tensor = checkpoint.tensor(name)
        if tensor.shape != weight.shape:
            said = f"{name} in {folder} has the shape {list(tensor.shape)}"
            raise ValueError(f"{key}: {said}, and config.json says {list(weight.shape)}; download it again")
        pairs[name] = weight, tensor
    return pairs
