"""Checks the rules of the algorithm: KL, loss, advantages, and responses that need an importance correction."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from megagrpo.config.basics.problems import Problem
from megagrpo.config.sections.algorithm import AlgorithmSection
from megagrpo.config.sections.loss_table import LOSSES
from megagrpo.config.sections.multi_turn import ANSWERING

if TYPE_CHECKING:
    from megagrpo.config import RunConfig

OTHER_DISTRIBUTION = "samples from a different distribution than the trainer's"


def kl_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield KL options that exclude each other, and reference options in a run without a reference."""
    a, m = config.algorithm, config.model
    estimator, in_reward, moves = "algorithm.kl_estimator", "algorithm.kl_in_reward", "algorithm.sync_ref_model"
    if a.full_kl and a.use_bias_correction_kl:
        reason = f"true corrects an estimate, but kl_estimator {a.kl_estimator} is exact"
        yield Problem(("algorithm.use_bias_correction_kl", estimator), f"{reason}; set it to false, or choose k1 or k3")
    if a.full_kl and a.beta and config.rollout.truncates:
        reason = f"{a.kl_estimator} needs both distributions over the same tokens"
        cause = "rollout.top_p, top_k and min_p exclude different tokens of reference and policy"
        keys = (estimator, "algorithm.beta", "rollout.top_p", "rollout.top_k", "rollout.min_p")
        yield Problem(keys, f"{reason}, but {cause}; choose k3, or sample from all tokens")
    if not a.beta:
        wanted: dict[str, object] = {in_reward: a.kl_in_reward}
        if not a.has_reference:
            wanted |= {moves: a.sync_ref_model, "model.reference_path": m.reference_path}
        reason = "needs a reference, but algorithm.beta is 0; raise beta"
        yield from [Problem((key, "algorithm.beta"), f"{value} {reason}") for key, value in wanted.items() if value]
    if config.lora.enabled and a.sync_ref_model and a.ref_model_mixup_alpha != 1:
        reason = f"{a.ref_model_mixup_alpha:g} mixes two adapters, which is no adapter of rank {config.lora.rank}"
        yield Problem(("algorithm.ref_model_mixup_alpha", "lora.rank"), f"{reason}; set it to 1")
    if config.lora.enabled and a.sync_ref_model and m.reference_path:
        reason = f"{m.reference_path} has other weights below the adapters, and checkpoints hold adapters only"
        yield Problem(("model.reference_path", moves, "lora.rank"), f"{reason}; set sync_ref_model to false")
    if a.kl_in_reward and a.kl_estimator != "k1":
        yield Problem((estimator, in_reward), f"{a.kl_estimator} is not supported with kl_in_reward; set it to k1")
    if a.kl_in_reward and a.use_bias_correction_kl:
        reason = "true corrects a KL term in the loss, but with kl_in_reward the loss has none; set it to false"
        yield Problem(("algorithm.use_bias_correction_kl", in_reward), reason)
    if a.kl_in_reward and a.multi_objective_aggregation == "normalize_then_sum":
        reason = "true changes the summed reward, but normalize_then_sum normalizes each function separately"
        yield Problem((in_reward, "algorithm.multi_objective_aggregation"), f"{reason}; choose sum_then_normalize")


def loss_problems(a: AlgorithmSection) -> Iterator[Problem]:
    """Yield options of the loss that have no effect, or contradict each other."""
    key, loss = "algorithm.loss_type", a.loss
    if a.delta is not None and loss.clips != "ratio" and not loss.custom:
        clipped = ", ".join(name for name, row in LOSSES.items() if row.clips == "ratio")
        reason = f"{a.delta:g} has no effect with loss_type {a.loss_type}; leave it empty, or choose one of {clipped}"
        yield Problem(("algorithm.delta", key), reason)
    if loss.clips == "weight" and a.epsilon_high is None:
        reason = f"loss_type {a.loss_type} needs it as largest weight; ScaleRL uses 5.0"
        yield Problem(("algorithm.epsilon_high", key), reason)
    if a.loss_average is not None and not loss.custom:
        reason = f"{a.loss_average} only applies to a custom loss, but {a.loss_type} averages by {loss.average}"
        yield Problem(("algorithm.loss_average", key), f"{reason}; leave it empty")
    if loss.own_ratio and a.importance_sampling_level != "token":
        reason = f"{a.importance_sampling_level} is not supported: loss_type {a.loss_type} has its own sequence ratio"
        yield Problem(("algorithm.importance_sampling_level", key), f"{reason}; set it to token")
    if a.use_adaptive_entropy and a.entropy_coef_min > a.entropy_coef_max:
        keys = ("algorithm.entropy_coef_min", "algorithm.entropy_coef_max", "algorithm.use_adaptive_entropy")
        yield Problem(keys, f"{a.entropy_coef_min} is above entropy_coef_max {a.entropy_coef_max}; lower it")
    if a.importance_correction != "off":
        yield from _correction_problems(a)


def _correction_problems(a: AlgorithmSection) -> Iterator[Problem]:
    """Yield what contradicts an importance correction, and a missing or empty band."""
    key = "algorithm.importance_correction"
    correction, low, high = a.importance_correction, a.importance_correction_min, a.importance_correction_max
    if a.loss.own_correction and not correction.startswith("token"):
        reason = f"{correction} counts token weights twice, because {a.loss_type} sums them too"
        yield Problem((key, "algorithm.loss_type"), f"{reason}; choose token_truncate or token_mask")
    if low is None and high is None:
        reason = f"{correction} needs a band; set importance_correction_min, importance_correction_max or both"
        yield Problem((key, f"{key}_min", f"{key}_max"), reason)
    elif low is not None and high is not None and low >= high:
        reason = f"{low} is not below importance_correction_max {high}; lower it"
        yield Problem((f"{key}_min", f"{key}_max", key), reason)


def advantage_problems(a: AlgorithmSection) -> Iterator[Problem]:
    """Yield normalizations of rewards that exclude each other."""
    estimator, scale = "algorithm.advantage_estimator", "algorithm.scale_rewards"
    if a.own_estimator and a.scale_rewards != "group":
        reason = f"{a.scale_rewards} has no effect: advantage_estimator is a function of your own"
        yield Problem((scale, estimator), f"{reason}; leave it out")
    elif a.advantage_estimator.startswith("reinforce_plus_plus") and a.scale_rewards != "batch":
        reason = f"{a.scale_rewards}, but advantage_estimator {a.advantage_estimator} divides by the batch's std"
        yield Problem((scale, estimator), f"{reason}; set it to batch")
    if a.multi_objective_aggregation == "normalize_then_sum" and (a.advantage_estimator, a.scale_rewards) != (
        "grpo",
        "group",
    ):
        reason = "normalize_then_sum normalizes within groups, then over the batch"
        fix = "set advantage_estimator grpo and scale_rewards group"
        yield Problem(("algorithm.multi_objective_aggregation", estimator, scale), f"{reason}; {fix}")


def critic_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield options of a critic without one, and options that exclude a critic."""
    a, key = config.algorithm, "algorithm.advantage_estimator"
    alone = {"rollout.num_generations": config.rollout.num_generations}
    for task in config.tasks:
        alone[f"tasks.{task.name}.rollout.num_generations"] = task.rollout.get("num_generations", 0)
    for where, group in alone.items() if a.loss.generates and not a.has_critic else ():
        if group == 1:
            yield Problem((where,), "must be at least 2 (got 1): rewards are compared with those of the same prompt")
    if not a.has_critic:
        for name, field in type(a.critic).model_fields.items():
            if (value := getattr(a.critic, name)) != field.default:
                reason = f"only applies with advantage_estimator gae, not {a.advantage_estimator}; leave it out"
                yield Problem((f"algorithm.critic.{name}", key), f"{value} {reason}")
        return
    for other, excluded, fix in (
        ("multi_turn.agent", bool(config.multi_turn.roles) and "roles", "choose grpo"),
        ("algorithm.advantage_by", a.advantage_by not in ("trajectory", "turn") and a.advantage_by, "set it to turn"),
        # forced tokens split a turn in two, each of which would earn the turn's reward
        (
            "rollout.max_thinking_tokens",
            a.advantage_by == "turn" and config.rollout.max_thinking_tokens,
            "leave it out",
        ),
    ):
        if excluded:
            yield Problem((other, key), f"{excluded} is not supported with advantage_estimator gae; {fix}")
    warmup, steps = ("algorithm.critic.warmup_steps", a.critic.warmup_steps), config.run.max_steps
    if steps is not None and warmup[1] >= steps:
        yield Problem(
            (warmup[0], "run.max_steps"), f"{warmup[1]} leaves no step of {steps} in which the policy learns; lower it"
        )
    if early := [step for step in config.debug.dump_steps if step <= warmup[1]]:
        reason = f"{early[0]} is a step in which only the critic learns; name one after critic.warmup_steps {warmup[1]}"
        yield Problem(("debug.dump_steps", warmup[0]), reason)


def turn_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield what contradicts advantages of turns or tokens, and options that only apply to them."""
    a, m = config.algorithm, config.multi_turn
    key, by = "algorithm.advantage_by", a.advantage_by
    fields = AlgorithmSection.model_fields
    for name, wanted in (
        ("turn_advantage_weight", ("turn", "state")),
        ("turn_discount", ("state",)),
        ("token_advantage_weight", ("token", "process")),
    ):
        if by not in wanted and (value := getattr(a, name)) != fields[name].default:
            reason = f"{value:g} only applies with advantage_by {' or '.join(wanted)}; leave it out"
            yield Problem((f"algorithm.{name}", key), reason)
    if by == "trajectory":
        return
    per = [function.per for function in config.rewards.functions]
    if a.advantage_by_tokens:
        if "token" not in per and not config.tasks:  # each task is checked
            reason = f"{by} needs rewards of tokens; set `per: token` for a function of your own"
            yield Problem((key, "rewards.functions"), f"{reason}, or set it to trajectory")
        if a.multi_objective_aggregation == "normalize_then_sum":
            reason = f"{by} normalizes rewards of tokens on their own, normalize_then_sum their sums once more"
            yield Problem((key, "algorithm.multi_objective_aggregation"), f"{reason}; choose sum_then_normalize")
    elif config.tasks:
        pass
    elif not m.enabled:
        yield Problem((key, *ANSWERING), f"{by} needs conversations with turns; set it to trajectory")
    elif by == "turn" and m.scheduler is None and m.environment is None and "turn" not in per:
        reason = "turn compares rewards of turns, which a scheduler, an environment's `step` or `per: turn` gives"
        yield Problem(
            (key, "multi_turn.scheduler", "multi_turn.environment", "rewards.functions"),
            f"{reason}; set it to state, name one, or set `per: turn` for a function of your own",
        )
    if a.kl_in_reward:
        reason = f"{by} needs advantages before the KL of kl_in_reward is known; set it to false"
        yield Problem((key, "algorithm.kl_in_reward"), reason)
    if a.scale_rewards == "batch":
        what = "tokens" if a.advantage_by_tokens else "turns"
        reason = f"{by} compares {what} within groups, which batch does not scale; set scale_rewards to group or none"
        yield Problem((key, "algorithm.scale_rewards"), reason)
    if a.loss.policy_term == "gmpo":
        reason = f"{by} is not supported: loss_type {a.loss_type} has one sign of the advantage for a whole response"
        yield Problem((key, "algorithm.loss_type"), f"{reason}; choose another loss")
    if a.off_policy_mask_threshold is not None:
        reason = f"{by} is not supported: the mask excludes whole responses by the sign of their advantage"
        yield Problem((key, "algorithm.off_policy_mask_threshold"), f"{reason}; leave it empty")


def role_problems(a: AlgorithmSection, roles: Collection[str]) -> Iterator[Problem]:
    """Yield what contradicts an advantage for each of an agent's roles, if it has any."""
    if not roles:
        return
    for name, excluded, fix in (
        ("advantage_by", a.advantage_by != "trajectory", "set it to trajectory"),
        ("kl_in_reward", a.kl_in_reward, "set it to false"),
    ):
        if excluded:
            reason = f"{getattr(a, name)} is not supported with roles, each of which has advantages of its own; {fix}"
            yield Problem((f"algorithm.{name}", "multi_turn.agent"), reason)


def quantization_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield the problem of quantized rollouts without importance correction."""
    if (quantization := config.rollout.quantization) != "none":
        cause = f"{quantization} {OTHER_DISTRIBUTION}"
        yield from uncorrected(config.algorithm, "rollout.quantization", cause, "set quantization to none")


def uncorrected(a: AlgorithmSection, key: str, cause: str, fix: str) -> Iterator[Problem]:
    """Yield the problem of responses that another distribution than the trainer's has sampled, by the `cause` at `key`,
    and that no importance correction weights."""
    if a.importance_correction == "off":
        correction = "algorithm.importance_correction"
        either = f"set the correction to token_truncate, or {fix.removeprefix('set ')}"
        yield Problem((key, correction), f"{cause}, but {correction} is off; {either}")


def ahead_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield settings that contradict `rollout.max_staleness` above 0, and settings that have no effect at 0."""
    r, a = config.rollout, config.algorithm
    if not r.max_staleness:
        for name, value, default in (
            ("in_flight", r.in_flight, "keep"),
            ("straggler_seconds", r.straggler_seconds, None),
        ):
            if value != default:
                reason = f"only applies with rollout.max_staleness > 0; raise max_staleness, or leave {name} out"
                yield Problem((f"rollout.{name}", "rollout.max_staleness"), f"{value} {reason}")
        return
    key, value = "rollout.max_staleness", r.max_staleness
    if r.placed == "colocated":
        reason = f"{value} requires servers that generate during training"
        cause = f"rollout.placement {r.placement} shares the trainer's GPUs"
        fix = "set placement to dedicated, or list servers in rollout.urls"
        yield Problem((key, "rollout.placement", "rollout.urls"), f"{reason}, but {cause}; {fix}")
    if config.train.offload:
        reason = "true offloads the trainer while servers generate"
        cause = f"with {key} > 0 they generate during training"
        yield Problem(("train.offload", key), f"{reason}, but {cause}; leave it empty")
    yield from uncorrected(a, key, f"{value} trains on responses of older weights", "set max_staleness to 0")
    if config.lora.syncs_adapters and r.in_flight == "keep":
        reason = "keep continues responses with new weights, but lora.sync is adapter: a request keeps its adapter"
        fix = "choose wait (responses end with their adapter) or resume (requested again with the new one)"
        yield Problem(("rollout.in_flight", "lora.sync", key), f"{reason}; {fix}")
