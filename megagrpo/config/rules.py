"""Rules that span fields of the configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megagrpo.config.ahead import ahead_problems
from megagrpo.config.algorithm import CLIPPED_LOSSES, AlgorithmSection
from megagrpo.config.evaluation import evaluation_problems
from megagrpo.config.lora import lora_problems
from megagrpo.config.multi_turn import multi_turn_problems
from megagrpo.config.placement import placement_problems

if TYPE_CHECKING:
    from megagrpo.config import RunConfig


def cross_field_problems(config: RunConfig) -> list[str]:
    """Rules that span fields, as `key: what is wrong; what to do`. Pure function of a config whose fields are each valid."""
    p, t, r, a = config.parallel, config.train, config.rollout, config.algorithm
    problems = (
        kl_problems(config) + loss_problems(a) + advantage_problems(a) + multi_turn_problems(config.multi_turn) + lora_problems(config)
    )
    problems += fp8_problems(config) + quantization_problems(config)
    if p.sequence_parallel and p.tp == 1:
        problems.append("parallel.sequence_parallel: needs parallel.tp > 1; set it to false or raise tp")
    if p.vpp > 1 and p.pp == 1:
        problems.append(f"parallel.vpp: {p.vpp} needs parallel.pp > 1; set vpp to 1 or raise pp")
    if p.pipeline_layers is not None and len(p.pipeline_layers) != p.pp * p.vpp:
        problems.append(
            f"parallel.pipeline_layers: {p.pipeline_layers} gives {len(p.pipeline_layers)} stage(s), pp {p.pp} x vpp {p.vpp} make "
            f"{p.pp * p.vpp}; give one number of layers per stage"
        )
    if r.enable_expert_parallel and r.tp == 1:
        problems.append("rollout.enable_expert_parallel: rollout.tp 1 is one worker, which has all experts; set it to false or raise tp")
    m = config.multi_turn
    if not getattr(config.rewards, "functions", True) and m.scheduler is None and m.environment is None:
        problems.append("rewards.functions: nothing gives rewards; name a function, or a scheduler or environment that does")
    if m.max_response_length is not None and m.max_response_length < r.max_completion_length:
        problems.append(
            f"multi_turn.max_response_length: {m.max_response_length} cannot hold one turn of rollout.max_completion_length "
            f"{r.max_completion_length}; raise it or shorten the turn"
        )
    if config.max_model_len > t.max_tokens_per_micro_batch:
        problems.append(
            f"train.max_tokens_per_micro_batch: {t.max_tokens_per_micro_batch} cannot hold the longest sample, "
            f"rollout.max_prompt_length {r.max_prompt_length} + {config.response_limit} = {config.max_model_len}"
        )
    samples, slices = r.prompts_per_step * r.num_generations, a.steps_per_generation
    if samples % slices:
        fitting = [n for n in range(1, samples + 1) if samples % n == 0]
        problems.append(
            f"algorithm.steps_per_generation: {slices} does not divide the step's {samples} samples, rollout.prompts_per_step "
            f"{r.prompts_per_step} x num_generations {r.num_generations}; use {min(fitting, key=lambda n: abs(n - slices))}"
        )
    optimizer_steps = config.run.max_steps * a.updates_per_step
    if t.warmup_steps > optimizer_steps:
        problems.append(f"train.warmup_steps: {t.warmup_steps} is more than the run's {optimizer_steps} optimizer steps")
    problems += optimizer_problems(config) + fused_problems(config)
    if t.min_learning_rate > t.learning_rate:
        problems.append(f"train.min_learning_rate: {t.min_learning_rate} is above train.learning_rate {t.learning_rate}")
    if late := [step for step in config.debug.dump_steps if step > config.run.max_steps]:
        problems.append(f"debug.dump_steps: step {late[0]} never comes, run.max_steps is {config.run.max_steps}; name an earlier step")
    if config.data.curriculum_low > config.data.curriculum_high:
        problems.append(
            f"data.curriculum_low: {config.data.curriculum_low} is above data.curriculum_high {config.data.curriculum_high}; no prompt is "
            "inside; exchange them"
        )
    return problems + evaluation_problems(config) + placement_problems(config) + ahead_problems(config)


def fused_problems(config: RunConfig) -> list[str]:
    """What the fused log-probs cannot do, and what needs them."""
    t, r, a, problems = config.train, config.rollout, config.algorithm, []
    if t.fused_logprobs and r.truncates:
        problems.append("train.fused_logprobs: true keeps no logits that rollout.top_p, top_k and min_p could sort; set it to false")
    elif t.fused_logprobs and a.full_kl and a.beta:
        problems.append(f"train.fused_logprobs: true keeps no logits that kl_estimator {a.kl_estimator} could compare; set it to false")
    if t.logprobs_fp8_recipe != "none" and not t.fused_logprobs:
        problems.append(
            f"train.logprobs_fp8_recipe: {t.logprobs_fp8_recipe} takes the fused kernels; choose none or set train.fused_logprobs to true"
        )
    return problems


def kl_problems(config: RunConfig) -> list[str]:
    """Ways of measuring and placing the KL that exclude each other, and settings of a reference that a run does not have."""
    a, problems = config.algorithm, []
    if a.full_kl and a.use_bias_correction_kl:
        problems.append(
            f"algorithm.use_bias_correction_kl: {a.kl_estimator} is exact and takes no correction; set it to false or choose k1 or k3"
        )
    if a.full_kl and a.beta and config.rollout.truncates:
        problems.append(
            f"algorithm.kl_estimator: {a.kl_estimator} compares all tokens, and rollout.top_p, top_k and min_p leave out other ones of the "
            "reference than of the policy; choose k3, or sample from all"
        )
    if not a.beta:
        wanted = {"algorithm.kl_in_reward": a.kl_in_reward, "algorithm.sync_ref_model": a.sync_ref_model}
        wanted["model.reference_path"] = config.model.reference_path
        problems += [f"{key}: {value} needs a reference, and algorithm.beta is 0; raise it" for key, value in wanted.items() if value]
    if config.lora.enabled and a.sync_ref_model:
        problems.append("algorithm.sync_ref_model: with LoRA the reference is the model with its first adapters; set it to false")
    if config.lora.enabled and config.model.reference_path:
        problems.append("model.reference_path: with LoRA the reference is the model with its first adapters; leave it empty")
    if a.kl_in_reward and a.kl_estimator != "k1":
        problems.append(f"algorithm.kl_estimator: {a.kl_estimator} belongs to the loss; kl_in_reward sums k1, set it to k1")
    if a.kl_in_reward and a.use_bias_correction_kl:
        problems.append("algorithm.use_bias_correction_kl: kl_in_reward adds no KL to the loss that it could correct; set it to false")
    if a.kl_in_reward and a.multi_objective_aggregation == "normalize_then_sum":
        problems.append("algorithm.kl_in_reward: normalize_then_sum normalises each function apart; choose sum_then_normalize")
    return problems


def loss_problems(a: AlgorithmSection) -> list[str]:
    """Options of the loss that would say nothing, or contradict each other."""
    problems = []
    if a.delta is not None and a.loss_type not in CLIPPED_LOSSES:
        problems.append(f"algorithm.delta: {a.loss_type} has no such bound; leave it empty or choose one of {', '.join(CLIPPED_LOSSES)}")
    if a.loss_type == "cispo" and a.epsilon_high is None:
        problems.append("algorithm.epsilon_high: cispo needs the largest weight itself; ScaleRL uses 5.0")
    if a.loss_type in ("vespo", "gmpo", "real") and a.importance_sampling_level != "token":
        problems.append(f"algorithm.importance_sampling_level: {a.loss_type} has its own sequence ratio; set it to token")
    if a.loss_type == "real":
        problems += [
            f"algorithm.{key}: real compares whole responses of a group and knows no {what}; set it to {neutral}"
            for key, value, what, neutral in (
                ("importance_correction", a.importance_correction, "weights of tokens", "off"),
                ("off_policy_mask_threshold", a.off_policy_mask_threshold, "left-out sequences", None),
                ("top_entropy_quantile", a.top_entropy_quantile, "left-out tokens", 1.0),
            )
            if value != neutral
        ]
    if a.use_adaptive_entropy and a.entropy_coef_min > a.entropy_coef_max:
        problems.append(f"algorithm.entropy_coef_min: {a.entropy_coef_min} is above entropy_coef_max {a.entropy_coef_max}; lower it")
    if a.loss_type == "real" and a.steps_per_generation > 1:
        problems.append(
            f"algorithm.steps_per_generation: real compares whole groups, and {a.steps_per_generation} optimizer steps hold parts of them; "
            "set it to 1"
        )
    correction, low, high = a.importance_correction, a.importance_correction_min, a.importance_correction_max
    if correction == "off":
        return problems
    if a.loss_type == "vespo" and not correction.startswith("token"):
        problems.append(
            f"algorithm.importance_correction: vespo sums the tokens' weights itself, {correction} would count them twice; "
            "choose token_truncate or token_mask"
        )
    if low is None and high is None:
        problems.append(f"algorithm.importance_correction: {correction} needs importance_correction_min, importance_correction_max or both")
    elif low is not None and high is not None and low >= high:
        problems.append(f"algorithm.importance_correction_min: {low} is not below importance_correction_max {high}")
    return problems


def advantage_problems(a: AlgorithmSection) -> list[str]:
    """Ways of normalising that exclude each other."""
    problems = []
    if a.advantage_estimator.startswith("reinforce_plus_plus") and a.scale_rewards != "batch":
        problems.append(
            f"algorithm.scale_rewards: {a.advantage_estimator} divides by the batch's std; set it to batch, not {a.scale_rewards}"
        )
    if a.multi_objective_aggregation == "normalize_then_sum" and (a.advantage_estimator, a.scale_rewards) != ("grpo", "group"):
        problems.append(
            "algorithm.multi_objective_aggregation: normalize_then_sum normalises within groups, then over the batch; it needs "
            "advantage_estimator grpo and scale_rewards group"
        )
    return problems


def fp8_problems(config: RunConfig) -> list[str]:
    """Options of products in FP8 where there are none, and adapters, whose linears are not multiplied so."""
    m = config.model
    problems = [
        f"model.{key}: {value} is about scales with a history, and model.fp8_recipe is {m.fp8_recipe}; choose delayed, or leave it out"
        for key, value in m.history_keys.items()
        if m.fp8_recipe != "delayed"
    ]
    if m.fp8_recipe != "none":
        why = "linears with an adapter are multiplied in model.precision"
        adapted = f"model.fp8_recipe: {m.fp8_recipe}, and {why}; choose none, or set lora.rank to 0"
        return problems + [adapted] * config.lora.enabled + (_fp8_param_problems(config) if m.fp8_param else [])
    said = {"model.fp8_format": m.fp8_format != "auto" and m.fp8_format, "model.bf16_layers": m.bf16_layers}
    said |= {f"model.{key}": getattr(m, key) and "true" for key in ("moe_router_padding_for_quantization", "fp8_param")}
    return problems + [
        f"{key}: {value} is about FP8, and model.fp8_recipe is none; choose a recipe, or leave it out"
        for key, value in said.items()
        if value
    ]


def _fp8_param_problems(config: RunConfig) -> list[str]:
    """What weights that are FP8 numbers between steps cannot be beside."""
    m, t, key, problems = config.model, config.train, "model.fp8_param: true", []
    if m.fp8_recipe in ("delayed", "mxfp8"):
        problems.append(f"{key} takes scales of a weight as it is, or of blocks of 128; choose tensorwise or blockwise, not {m.fp8_recipe}")
    if m.precision == "fp32":
        problems.append(f"{key}, and weights in float32 have no masters to be rounded from; set model.precision to bf16")
    if t.optimizer == "muon":
        problems.append(f"{key} takes masters that ranks share out, and Muon's are whole; set it to false, or train.optimizer to adam")
    elif not t.distributed_optimizer:
        problems.append(f"{key} takes masters that ranks share out; set train.distributed_optimizer to true")
    if config.algorithm.sync_ref_model:
        problems.append(f"{key} rounds small moves of a reference away; set algorithm.sync_ref_model to false")
    return problems


def quantization_problems(config: RunConfig) -> list[str]:
    """What rollouts in FP8 need, and what contradicts them."""
    r, a = config.rollout, config.algorithm
    key, problems = f"rollout.quantization: {r.quantization}", []
    if r.quantization == "none":
        return problems
    if a.loss_type == "real":
        problems.append(
            f"{key} samples from other probabilities than the trainer's, and the loss real has no correction for that; set it to none"
        )
    elif a.importance_correction == "off":
        problems.append(
            f"{key} samples from other probabilities than the trainer's, and algorithm.importance_correction is off; set it to "
            "token_truncate, or quantization to none"
        )
    if any(word.partition("=")[0] in ("--quantization", "-q") for word in r.extra_args):
        problems.append(f"rollout.extra_args: --quantization says it again, and {key} counts; leave one of them out")
    return problems


def optimizer_problems(config: RunConfig) -> list[str]:
    """What Muon does not go with, and buckets that nothing asked for."""
    t, problems = config.train, []
    if t.ddp_bucket_size is not None and t.overlap_grad_reduce is False:
        problems.append(
            f"train.ddp_bucket_size: {t.ddp_bucket_size} cuts what train.overlap_grad_reduce sums, which is false; leave one of them out"
        )
    if t.optimizer != "muon":
        return problems
    if t.distributed_optimizer:
        problems.append("train.distributed_optimizer: Muon needs whole matrices on every data-parallel rank; set it to false")
    if config.lora.enabled:
        problems.append("train.optimizer: muon is for whole weights, not for adapters; choose adam")
    if t.optimizer_state_dtype != "fp32" or t.optimizer_offload:
        problems.append(
            "train.optimizer_state_dtype: Muon's momentum stays in fp32 on the device; set it to fp32, and optimizer_offload to false"
        )
    return problems
