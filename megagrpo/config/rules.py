"""Rules that span fields of the configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megagrpo.config.ahead import ahead_problems
from megagrpo.config.algorithm import AlgorithmSection
from megagrpo.config.evaluation import evaluation_problems
from megagrpo.config.extra_args import extra_args_problems
from megagrpo.config.lora import lora_problems
from megagrpo.config.losses import LOSSES
from megagrpo.config.multi_turn import multi_turn_problems
from megagrpo.config.placement import placement_problems
from megagrpo.config.problems import Problem

if TYPE_CHECKING:
    from megagrpo.config import RunConfig

MOST_SAMPLES = 10_000_000  # of a step: their tokens and rewards are in the memory of a few processes
LONGEST_SAMPLE = ("rollout.max_prompt_length", "rollout.max_completion_length", "multi_turn.max_response_length")


def cross_field_problems(config: RunConfig) -> list[Problem]:
    """Problems of fields that are each valid and contradict each other. Pure function of the config."""
    a = config.algorithm
    return [
        *(kl_problems(config) + loss_problems(a) + advantage_problems(a) + multi_turn_problems(config.multi_turn) + lora_problems(config)),
        *(fp8_problems(config) + quantization_problems(config) + layout_problems(config) + length_problems(config)),
        *(step_problems(config) + optimizer_problems(config) + fused_problems(config) + data_problems(config)),
        *(evaluation_problems(config) + placement_problems(config) + ahead_problems(config)),
        *extra_args_problems(config),
    ]


def layout_problems(config: RunConfig) -> list[Problem]:
    """Sizes of the parallel layout that need each other."""
    p, problems = config.parallel, []
    if p.sequence_parallel and p.tp == 1:
        keys = ("parallel.sequence_parallel", "parallel.tp")
        problems.append(Problem(keys, "needs parallel.tp > 1; set it to false or raise tp", rule=8))
    if p.vpp > 1 and p.pp == 1:
        problems.append(Problem(("parallel.vpp", "parallel.pp"), f"{p.vpp} needs parallel.pp > 1; set vpp to 1 or raise pp", rule=5))
    if p.pipeline_layers is not None and len(p.pipeline_layers) != p.pp * p.vpp:
        problems.append(
            Problem(
                ("parallel.pipeline_layers", "parallel.pp", "parallel.vpp"),
                f"{p.pipeline_layers} gives {len(p.pipeline_layers)} stage(s), pp {p.pp} x vpp {p.vpp} make {p.pp * p.vpp}; give one "
                "number of layers per stage",
                rule=5,
            )
        )
    if config.rollout.enable_expert_parallel and config.rollout.tp == 1:
        keys = ("rollout.enable_expert_parallel", "rollout.tp")
        problems.append(Problem(keys, "rollout.tp 1 is one worker, which has all experts; set it to false or raise tp"))
    return problems


def length_problems(config: RunConfig) -> list[Problem]:
    """Lengths that do not hold what is put into them."""
    r, m, t, problems = config.rollout, config.multi_turn, config.train, []
    if m.max_response_length is not None and m.max_response_length < r.max_completion_length:
        problems.append(
            Problem(
                ("multi_turn.max_response_length", "rollout.max_completion_length"),
                f"{m.max_response_length} cannot hold one turn of rollout.max_completion_length {r.max_completion_length}; raise it or "
                "shorten the turn",
            )
        )
    if config.max_model_len > t.max_tokens_per_micro_batch:
        problems.append(
            Problem(
                ("train.max_tokens_per_micro_batch", *LONGEST_SAMPLE),
                f"{t.max_tokens_per_micro_batch} cannot hold the longest sample, rollout.max_prompt_length {r.max_prompt_length} + "
                f"{config.response_limit} = {config.max_model_len}",
                rule=14,
            )
        )
    return problems


def step_problems(config: RunConfig) -> list[Problem]:
    """Numbers of samples and steps that do not fit each other."""
    r, a, t, run, problems = config.rollout, config.algorithm, config.train, config.run, []
    samples, slices = r.prompts_per_step * r.num_generations, a.steps_per_generation
    if samples > MOST_SAMPLES:
        said = f"{r.prompts_per_step} x num_generations {r.num_generations} = {samples} samples, and a step holds at most {MOST_SAMPLES}; "
        problems.append(Problem(("rollout.prompts_per_step", "rollout.num_generations"), f"{said}lower one of them"))
    elif samples % slices:
        problems.append(
            Problem(
                ("algorithm.steps_per_generation", "rollout.prompts_per_step", "rollout.num_generations"),
                f"{slices} does not divide the step's {samples} samples, rollout.prompts_per_step {r.prompts_per_step} x num_generations "
                f"{r.num_generations}; use {_nearest_divisor(samples, slices)}",
                rule=12,
            )
        )
    optimizer_steps = run.max_steps * a.updates_per_step
    if t.warmup_steps > optimizer_steps:
        keys = ("train.warmup_steps", "run.max_steps", "algorithm.num_iterations", "algorithm.steps_per_generation")
        problems.append(
            Problem(keys, f"{t.warmup_steps} is more than the run's {optimizer_steps} optimizer steps; lower it, or raise run.max_steps")
        )
    if late := [step for step in config.debug.dump_steps if step > run.max_steps]:
        said = f"step {late[0]} never comes, run.max_steps is {run.max_steps}; name an earlier step"
        problems.append(Problem(("debug.dump_steps", "run.max_steps"), said))
    return problems


def _nearest_divisor(of: int, near: int) -> int:
    """The divisor of `of` that is nearest to `near`, the smaller of two."""
    near = min(near, of)
    return next(n for distance in range(near) for n in (near - distance, near + distance) if of % n == 0)


def data_problems(config: RunConfig) -> list[Problem]:
    """What prompts and rewards lack."""
    d, m, problems = config.data, config.multi_turn, []
    if not config.rewards.functions and m.scheduler is None and m.environment is None:
        keys = ("rewards.functions", "multi_turn.scheduler", "multi_turn.environment")
        problems.append(Problem(keys, "nothing gives rewards; name a function, or a scheduler or environment that does", rule=18))
    if d.curriculum_low > d.curriculum_high:
        said = f"{d.curriculum_low} is above data.curriculum_high {d.curriculum_high}; the interval is empty; swap the two"
        problems.append(Problem(("data.curriculum_low", "data.curriculum_high"), said))
    return problems


def fused_problems(config: RunConfig) -> list[Problem]:
    """What the fused log-probs cannot do, and what needs them."""
    t, r, a, problems = config.train, config.rollout, config.algorithm, []
    if t.fused_logprobs and r.truncates:
        said = "true keeps no logits that rollout.top_p, top_k and min_p could sort; set it to false"
        problems.append(Problem(("train.fused_logprobs", "rollout.top_p", "rollout.top_k", "rollout.min_p"), said))
    elif t.fused_logprobs and a.full_kl and a.beta:
        said = f"true keeps no logits that kl_estimator {a.kl_estimator} could compare; set it to false"
        problems.append(Problem(("train.fused_logprobs", "algorithm.kl_estimator", "algorithm.beta"), said))
    if t.logprobs_fp8_recipe != "none" and not t.fused_logprobs:
        said = f"{t.logprobs_fp8_recipe} takes the fused kernels; choose none or set train.fused_logprobs to true"
        problems.append(Problem(("train.logprobs_fp8_recipe", "train.fused_logprobs"), said))
    return problems


def kl_problems(config: RunConfig) -> list[Problem]:
    """Ways of measuring and placing the KL that exclude each other, and settings of a reference that a run does not have."""
    a, m, problems = config.algorithm, config.model, []
    estimator, in_reward, moves = "algorithm.kl_estimator", "algorithm.kl_in_reward", "algorithm.sync_ref_model"
    if a.full_kl and a.use_bias_correction_kl:
        said = f"{a.kl_estimator} is exact and takes no correction; set it to false or choose k1 or k3"
        problems.append(Problem(("algorithm.use_bias_correction_kl", estimator), said))
    if a.full_kl and a.beta and config.rollout.truncates:
        problems.append(
            Problem(
                (estimator, "algorithm.beta", "rollout.top_p", "rollout.top_k", "rollout.min_p"),
                f"{a.kl_estimator} compares all tokens, and rollout.top_p, top_k and min_p leave out other ones of the reference than of "
                "the policy; choose k3, or sample from all",
            )
        )
    if not a.beta:
        wanted = {in_reward: a.kl_in_reward, moves: a.sync_ref_model, "model.reference_path": m.reference_path}
        said = "needs a reference, and algorithm.beta is 0; raise it"
        problems += [Problem((key, "algorithm.beta"), f"{value} {said}") for key, value in wanted.items() if value]
    if config.lora.enabled and a.sync_ref_model:
        problems.append(Problem((moves, "lora.rank"), "with LoRA the reference is the model with its first adapters; set it to false"))
    if config.lora.enabled and m.reference_path:
        said = "with LoRA the reference is the model with its first adapters; leave it empty"
        problems.append(Problem(("model.reference_path", "lora.rank"), said))
    if a.kl_in_reward and a.kl_estimator != "k1":
        problems.append(Problem((estimator, in_reward), f"{a.kl_estimator} belongs to the loss; kl_in_reward sums k1, set it to k1"))
    if a.kl_in_reward and a.use_bias_correction_kl:
        said = "kl_in_reward adds no KL to the loss that it could correct; set it to false"
        problems.append(Problem(("algorithm.use_bias_correction_kl", in_reward), said))
    if a.kl_in_reward and a.multi_objective_aggregation == "normalize_then_sum":
        said = "normalize_then_sum normalises each function apart; choose sum_then_normalize"
        problems.append(Problem((in_reward, "algorithm.multi_objective_aggregation"), said))
    return problems


def loss_problems(a: AlgorithmSection) -> list[Problem]:
    """Options of the loss that would say nothing, or contradict each other."""
    problems, key, loss = [], "algorithm.loss_type", a.loss
    if a.delta is not None and loss.clips != "ratio" and not loss.custom:
        clipped = ", ".join(name for name, row in LOSSES.items() if row.clips == "ratio")
        said = f"{a.loss_type} has no such bound; leave it empty or choose one of {clipped}"
        problems.append(Problem(("algorithm.delta", key), said))
    if loss.clips == "weight" and a.epsilon_high is None:
        problems.append(Problem(("algorithm.epsilon_high", key), f"{a.loss_type} needs the largest weight itself; ScaleRL uses 5.0"))
    if a.loss_average is not None and not loss.custom:
        said = f"{a.loss_type} has its own average, {loss.average}; leave loss_average empty, or name a loss of your own in loss_type"
        problems.append(Problem(("algorithm.loss_average", key), said))
    if loss.own_ratio and a.importance_sampling_level != "token":
        said = f"{a.loss_type} has its own sequence ratio; set it to token"
        problems.append(Problem(("algorithm.importance_sampling_level", key), said))
    if loss.whole_step:
        problems += _whole_step_problems(a)
    if a.use_adaptive_entropy and a.entropy_coef_min > a.entropy_coef_max:
        keys = ("algorithm.entropy_coef_min", "algorithm.entropy_coef_max", "algorithm.use_adaptive_entropy")
        problems.append(Problem(keys, f"{a.entropy_coef_min} is above entropy_coef_max {a.entropy_coef_max}; lower it"))
    return problems if a.importance_correction == "off" else problems + _correction_problems(a)


def _whole_step_problems(a: AlgorithmSection) -> list[Problem]:
    """Options of single tokens and sequences, beside a loss that compares the responses of a group."""
    name, key = a.loss_type, "algorithm.loss_type"
    problems = [
        Problem((f"algorithm.{option}", key), f"{name} compares whole responses of a group and knows no {what}; set it to {neutral}")
        for option, value, what, neutral in (
            ("importance_correction", a.importance_correction, "weights of tokens", "off"),
            ("off_policy_mask_threshold", a.off_policy_mask_threshold, "left-out sequences", None),
            ("top_entropy_quantile", a.top_entropy_quantile, "left-out tokens", 1.0),
        )
        if value != neutral
    ]
    if a.steps_per_generation > 1:
        said = f"{name} compares whole groups, and {a.steps_per_generation} optimizer steps hold parts of them; set it to 1"
        problems.append(Problem(("algorithm.steps_per_generation", key), said))
    return problems


def _correction_problems(a: AlgorithmSection) -> list[Problem]:
    """What contradicts an importance correction, or lacks from it."""
    key, problems = "algorithm.importance_correction", []
    correction, low, high = a.importance_correction, a.importance_correction_min, a.importance_correction_max
    if a.loss.own_correction and not correction.startswith("token"):
        said = f"{a.loss_type} sums the tokens' weights itself, {correction} would count them twice; choose token_truncate or token_mask"
        problems.append(Problem((key, "algorithm.loss_type"), said))
    if low is None and high is None:
        said = f"{correction} needs importance_correction_min, importance_correction_max or both"
        problems.append(Problem((key, f"{key}_min", f"{key}_max"), said))
    elif low is not None and high is not None and low >= high:
        said = f"{low} is not below importance_correction_max {high}"
        problems.append(Problem((f"{key}_min", f"{key}_max", key), said))
    return problems


def advantage_problems(a: AlgorithmSection) -> list[Problem]:
    """Ways of normalising that exclude each other."""
    problems, estimator, scale = [], "algorithm.advantage_estimator", "algorithm.scale_rewards"
    if a.advantage_estimator.startswith("reinforce_plus_plus") and a.scale_rewards != "batch":
        said = f"{a.advantage_estimator} divides by the batch's std; set it to batch, not {a.scale_rewards}"
        problems.append(Problem((scale, estimator), said))
    if a.multi_objective_aggregation == "normalize_then_sum" and (a.advantage_estimator, a.scale_rewards) != ("grpo", "group"):
        said = "normalize_then_sum normalises within groups, then over the batch; it needs advantage_estimator grpo and scale_rewards group"
        problems.append(Problem(("algorithm.multi_objective_aggregation", estimator, scale), said))
    return problems


def fp8_problems(config: RunConfig) -> list[Problem]:
    """Options of products in FP8 where there are none, and adapters, whose linears are not multiplied so."""
    m, recipe = config.model, "model.fp8_recipe"
    problems = [
        Problem(
            (f"model.{key}", recipe),
            f"{value} is about scales with a history, and model.fp8_recipe is {m.fp8_recipe}; choose delayed, or leave it out",
        )
        for key, value in m.history_keys.items()
        if m.fp8_recipe != "delayed"
    ]
    if m.fp8_recipe != "none":
        why = "linears with an adapter are multiplied in model.precision"
        adapted = Problem((recipe, "lora.rank"), f"{m.fp8_recipe}, and {why}; choose none, or set lora.rank to 0")
        return problems + [adapted] * config.lora.enabled + (_fp8_param_problems(config) if m.fp8_param else [])
    said: dict[str, object] = {"model.fp8_format": m.fp8_format != "auto" and m.fp8_format, "model.bf16_layers": m.bf16_layers}
    said |= {f"model.{key}": getattr(m, key) and "true" for key in ("moe_router_padding_for_quantization", "fp8_param")}
    return problems + [
        Problem((key, recipe), f"{value} is about FP8, and model.fp8_recipe is none; choose a recipe, or leave it out")
        for key, value in said.items()
        if value
    ]


def _fp8_param_problems(config: RunConfig) -> list[Problem]:
    """What weights that are FP8 numbers between steps cannot be beside."""
    m, t, key, problems = config.model, config.train, "model.fp8_param", []
    if m.fp8_recipe in ("delayed", "mxfp8"):
        said = f"true takes scales of a weight as it is, or of blocks of 128; choose tensorwise or blockwise, not {m.fp8_recipe}"
        problems.append(Problem((key, "model.fp8_recipe"), said))
    if m.precision == "fp32":
        said = "true, and weights in float32 have no masters to be rounded from; set model.precision to bf16"
        problems.append(Problem((key, "model.precision"), said))
    if t.optimizer == "muon":
        said = "true takes masters that ranks share out, and Muon's are whole; set it to false, or train.optimizer to adam"
        problems.append(Problem((key, "train.optimizer"), said))
    elif not t.distributed_optimizer:
        said = "true takes masters that ranks share out; set train.distributed_optimizer to true"
        problems.append(Problem((key, "train.distributed_optimizer"), said))
    if config.algorithm.sync_ref_model:
        said = "true rounds small moves of a reference away; set algorithm.sync_ref_model to false"
        problems.append(Problem((key, "algorithm.sync_ref_model"), said))
    return problems


def quantization_problems(config: RunConfig) -> list[Problem]:
    """What rollouts in FP8 need, and what contradicts them."""
    r, a, key = config.rollout, config.algorithm, "rollout.quantization"
    problems: list[Problem] = []
    if r.quantization == "none":
        return problems
    samples = f"{r.quantization} samples from other probabilities than the trainer's, and"
    if a.loss.whole_step:
        said = f"{samples} the loss {a.loss_type} has no correction for that; set it to none"
        problems.append(Problem((key, "algorithm.loss_type"), said))
    elif a.importance_correction == "off":
        said = f"{samples} algorithm.importance_correction is off; set it to token_truncate, or quantization to none"
        problems.append(Problem((key, "algorithm.importance_correction"), said))
    return problems


def optimizer_problems(config: RunConfig) -> list[Problem]:
    """What Muon does not go with, buckets that nothing asked for, and a learning rate that ends above its peak."""
    t, problems, optimizer = config.train, [], "train.optimizer"
    if t.ddp_bucket_size is not None and t.overlap_grad_reduce is False:
        said = f"{t.ddp_bucket_size} cuts what train.overlap_grad_reduce sums, which is false; leave one of them out"
        problems.append(Problem(("train.ddp_bucket_size", "train.overlap_grad_reduce"), said))
    if t.min_learning_rate > t.learning_rate:
        said = f"{t.min_learning_rate} is above train.learning_rate {t.learning_rate}; lower it"
        problems.append(Problem(("train.min_learning_rate", "train.learning_rate"), said))
    if t.optimizer != "muon":
        return problems
    if t.distributed_optimizer:
        said = "Muon needs whole matrices on every data-parallel rank; set it to false"
        problems.append(Problem(("train.distributed_optimizer", optimizer), said))
    if config.lora.enabled:
        problems.append(Problem((optimizer, "lora.rank"), "muon is for whole weights, not for adapters; choose adam"))
    if t.optimizer_state_dtype != "fp32" or t.optimizer_offload:
        said = "Muon's momentum stays in fp32 on the device; set it to fp32, and optimizer_offload to false"
        problems.append(Problem(("train.optimizer_state_dtype", "train.optimizer_offload", optimizer), said))
    return problems
