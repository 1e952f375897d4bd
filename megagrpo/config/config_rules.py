"""Checks the rules that span several fields of the configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megagrpo.config.algorithm import AlgorithmSection
from megagrpo.config.data import RENDERER_ARGUMENTS
from megagrpo.config.evaluation import evaluation_problems
from megagrpo.config.extra_args import extra_args_problems
from megagrpo.config.lora import lora_problems
from megagrpo.config.loss_table import LOSSES
from megagrpo.config.multi_turn import multi_turn_problems
from megagrpo.config.paths import path_problems
from megagrpo.config.placement import nearest_divisor, placement_problems
from megagrpo.config.problems import Problem
from megagrpo.config.staleness_rules import ahead_problems
from megagrpo.config.tracker_options import tracker_problems

if TYPE_CHECKING:
    from megagrpo.config import RunConfig

MOST_SAMPLES = 10_000_000  # limit per step: a few processes hold all tokens and rewards in memory
LONGEST_SAMPLE = ("rollout.max_prompt_length", "rollout.max_completion_length", "multi_turn.max_response_length")


def cross_field_problems(config: RunConfig) -> list[Problem]:
    """Return the problems of fields that are each valid but contradict each other. Pure function of the config."""
    a = config.algorithm
    return [
        *(
            kl_problems(config)
            + loss_problems(a)
            + advantage_problems(a)
            + multi_turn_problems(config.multi_turn)
            + lora_problems(config)
        ),
        *(fp8_problems(config) + quantization_problems(config) + layout_problems(config) + length_problems(config)),
        *(
            step_problems(config)
            + optimizer_problems(config)
            + fused_problems(config)
            + data_problems(config)
            + stop_problems(config)
        ),
        *(evaluation_problems(config) + placement_problems(config) + ahead_problems(config)),
        *(extra_args_problems(config) + tracker_problems(config) + path_problems(config)),
    ]


def layout_problems(config: RunConfig) -> list[Problem]:
    """Return sizes of the parallel layout that contradict each other."""
    p, problems = config.parallel, []
    if p.sequence_parallel and p.tp == 1:
        keys = ("parallel.sequence_parallel", "parallel.tp")
        problems.append(Problem(keys, "true needs parallel.tp > 1; set it to false, or raise tp", rule=8))
    if p.vpp > 1 and p.pp == 1:
        problems.append(
            Problem(("parallel.vpp", "parallel.pp"), f"{p.vpp} needs parallel.pp > 1; set vpp to 1 or raise pp", rule=5)
        )
    if p.pipeline_layers is not None and len(p.pipeline_layers) != p.pp * p.vpp:
        problems.append(
            Problem(
                ("parallel.pipeline_layers", "parallel.pp", "parallel.vpp"),
                f"{p.pipeline_layers} has {len(p.pipeline_layers)} number(s), but pp {p.pp} x vpp {p.vpp} = "
                f"{p.pp * p.vpp} stages; give "
                "one number of layers per stage",
                rule=5,
            )
        )
    return problems + server_layout_problems(config)


def server_layout_problems(config: RunConfig) -> list[Problem]:
    """Return sizes of a vLLM server that contradict each other."""
    r, problems, experts = config.rollout, [], "rollout.enable_expert_parallel"
    if r.enable_expert_parallel and r.tp * r.dp == 1:
        said = (
            "true needs several workers per server, but rollout.tp and rollout.dp are 1; set it to false, or raise "
            "tp or dp"
        )
        problems.append(Problem((experts, "rollout.tp", "rollout.dp"), said))
    if r.dp > 1 and not r.enable_expert_parallel:
        said = (
            f"{r.dp} copies of the attention share experts, but {experts} is false; set it to true, or use more "
            f"rollout.servers"
        )
        problems.append(Problem(("rollout.dp", experts), said))
    # vLLM passes on the reports of the first copy only
    if r.dp > 1 and r.placed == "colocated" and config.run.nodes > 1:
        said = (
            f"{r.dp} needs servers whose reports the trainer can read, but colocated servers are on "
            f"{config.run.nodes} nodes; choose "
        )
        problems.append(Problem(("rollout.dp", "rollout.placement", "run.nodes"), f"{said}dedicated, or set dp to 1"))
    if r.dp * r.pp > 1 and config.lora.syncs_adapters:
        said = (
            f"{r.server_text}, but lora.sync adapter supports tensor parallelism only; set pp and dp to 1, or "
            f"lora.sync to merged"
        )
        problems.append(Problem(("rollout.pp", "rollout.dp", "lora.sync"), said))
    return problems


def length_problems(config: RunConfig) -> list[Problem]:
    """Return limits in tokens that are smaller than what they must hold."""
    r, m, t, problems = config.rollout, config.multi_turn, config.train, []
    if m.max_response_length is not None and m.max_response_length < r.max_completion_length:
        problems.append(
            Problem(
                ("multi_turn.max_response_length", "rollout.max_completion_length"),
                f"{m.max_response_length} is less than one turn, rollout.max_completion_length "
                f"{r.max_completion_length}; raise it, or "
                "lower the turn's limit",
            )
        )
    if config.max_model_len > t.max_tokens_per_micro_batch:
        problems.append(
            Problem(
                ("train.max_tokens_per_micro_batch", *LONGEST_SAMPLE),
                f"{t.max_tokens_per_micro_batch} is less than the longest sample, rollout.max_prompt_length "
                f"{r.max_prompt_length} + "
                f"{config.response_limit} = {config.max_model_len}; raise it, or shorten the sample",
                rule=14,
            )
        )
    return problems


def step_problems(config: RunConfig) -> list[Problem]:
    """Return numbers of samples and steps that contradict each other."""
    r, a, t, run, problems = config.rollout, config.algorithm, config.train, config.run, []
    samples, slices = r.prompts_per_step * r.num_generations, a.steps_per_generation
    if samples > MOST_SAMPLES:
        said = (
            f"{r.prompts_per_step} x num_generations {r.num_generations} = {samples} samples; the limit per step "
            f"is {MOST_SAMPLES}; "
        )
        problems.append(Problem(("rollout.prompts_per_step", "rollout.num_generations"), f"{said}lower one of them"))
    elif samples % slices:
        problems.append(
            Problem(
                ("algorithm.steps_per_generation", "rollout.prompts_per_step", "rollout.num_generations"),
                f"{slices} does not divide the step's {samples} samples, rollout.prompts_per_step {r.prompts_per_step} "
                f"x num_generations "
                f"{r.num_generations}; use {nearest_divisor(samples, slices)}",
                rule=12,
            )
        )
    if t.warmup_steps and t.warmup_ratio:
        said = f"{t.warmup_ratio:g} and train.warmup_steps {t.warmup_steps} both set the warm-up; set one of them to 0"
        problems.append(Problem(("train.warmup_ratio", "train.warmup_steps"), said))
    if run.max_steps is None and run.num_train_epochs is not None:
        return problems  # the number of steps depends on the data; `RunConfig.with_num_prompts` checks the rest
    optimizer_steps = run.num_steps * a.updates_per_step
    if t.warmup_steps > optimizer_steps:
        keys = ("train.warmup_steps", "run.max_steps", "algorithm.num_iterations", "algorithm.steps_per_generation")
        problems.append(
            Problem(
                keys,
                f"{t.warmup_steps} exceeds the run's {optimizer_steps} optimizer steps; lower it, or raise "
                f"run.max_steps",
            )
        )
    for key, steps in (("debug.dump_steps", config.debug.dump_steps), ("run.profile.steps", run.profile.steps)):
        if late := [step for step in steps if step > run.num_steps]:
            said = f"step {late[0]} is after the last step, run.max_steps {run.num_steps}; name an earlier step"
            problems.append(Problem((key, "run.max_steps"), said))
    return problems


def data_problems(config: RunConfig) -> list[Problem]:
    """Return the problem of a run without rewards, an empty curriculum interval, and variables that the chat template
    cannot get."""
    d, m, problems = config.data, config.multi_turn, []
    if taken := [name for name in d.chat_template_kwargs if name in RENDERER_ARGUMENTS]:
        said = f"`{taken[0]}` is an argument of the renderer, not a variable of the template; leave it out"
        problems.append(Problem((f"data.chat_template_kwargs.{taken[0]}",), said))
    if d.chat_template_kwargs and d.chat_template == "none":
        said = "has no effect, because data.chat_template is none; leave one of them out"
        problems.append(Problem(("data.chat_template_kwargs", "data.chat_template"), said))
    if not config.rewards.functions and m.scheduler is None and m.environment is None:
        keys = ("rewards.functions", "multi_turn.scheduler", "multi_turn.environment")
        problems.append(
            Problem(
                keys,
                "the run has no rewards; name a function, or a scheduler or environment that gives rewards",
                rule=18,
            )
        )
    if d.curriculum_low > d.curriculum_high:
        said = (
            f"{d.curriculum_low} is above data.curriculum_high {d.curriculum_high}; the interval is empty; swap the two"
        )
        problems.append(Problem(("data.curriculum_low", "data.curriculum_high"), said))
    return problems


def stop_problems(config: RunConfig) -> list[Problem]:
    """Return stop strings that no vLLM server could find, and a text option without stop strings."""
    r, key = config.rollout, "rollout.stop"
    if not r.stop and not r.include_stop_str_in_output:
        said = "false has no effect without rollout.stop; name texts that end a response, or leave it out"
        return [Problem(("rollout.include_stop_str_in_output", key), said)]
    if r.stop and str(config.model.tokenizer).endswith(".model"):
        said = (
            "needs a tokenizer that vLLM loads, but model.tokenizer is a bare SentencePiece file; name a Hugging "
            "Face folder"
        )
        return [Problem((key, "model.tokenizer"), said)]
    return []


def fused_problems(config: RunConfig) -> list[Problem]:
    """Return options that the fused log-probs do not support, and options that need them."""
    t, r, a, problems = config.train, config.rollout, config.algorithm, []
    if t.fused_logprobs and r.truncates:
        said = "true writes no logits, which rollout.top_p, top_k and min_p need; set it to false"
        problems.append(Problem(("train.fused_logprobs", "rollout.top_p", "rollout.top_k", "rollout.min_p"), said))
    elif t.fused_logprobs and a.full_kl and a.beta:
        said = f"true writes no logits, which kl_estimator {a.kl_estimator} needs; set it to false"
        problems.append(Problem(("train.fused_logprobs", "algorithm.kl_estimator", "algorithm.beta"), said))
    if t.logprobs_fp8_recipe != "none" and not t.fused_logprobs:
        said = f"{t.logprobs_fp8_recipe} needs the fused kernels; choose none, or set train.fused_logprobs to true"
        problems.append(Problem(("train.logprobs_fp8_recipe", "train.fused_logprobs"), said))
    return problems


def kl_problems(config: RunConfig) -> list[Problem]:
    """Return KL options that exclude each other, and reference options in a run without a reference."""
    a, m, problems = config.algorithm, config.model, []
    estimator, in_reward, moves = "algorithm.kl_estimator", "algorithm.kl_in_reward", "algorithm.sync_ref_model"
    if a.full_kl and a.use_bias_correction_kl:
        said = (
            f"true corrects an estimate, but kl_estimator {a.kl_estimator} is exact; set it to false, or choose k1 "
            f"or k3"
        )
        problems.append(Problem(("algorithm.use_bias_correction_kl", estimator), said))
    if a.full_kl and a.beta and config.rollout.truncates:
        problems.append(
            Problem(
                (estimator, "algorithm.beta", "rollout.top_p", "rollout.top_k", "rollout.min_p"),
                f"{a.kl_estimator} needs both distributions over the same tokens, but rollout.top_p, top_k and min_p "
                f"exclude different "
                "tokens of reference and policy; choose k3, or sample from all tokens",
            )
        )
    if not a.beta:
        wanted = {in_reward: a.kl_in_reward, moves: a.sync_ref_model, "model.reference_path": m.reference_path}
        said = "needs a reference, but algorithm.beta is 0; raise beta"
        problems += [Problem((key, "algorithm.beta"), f"{value} {said}") for key, value in wanted.items() if value]
    if config.lora.enabled and a.sync_ref_model:
        said = (
            "true is not supported with LoRA, whose reference is the model with its initial adapters; set it to false"
        )
        problems.append(Problem((moves, "lora.rank"), said))
    if config.lora.enabled and m.reference_path:
        said = (
            f"{m.reference_path} is not supported with LoRA, whose reference is the model with its initial "
            f"adapters; leave it empty"
        )
        problems.append(Problem(("model.reference_path", "lora.rank"), said))
    if a.kl_in_reward and a.kl_estimator != "k1":
        problems.append(
            Problem((estimator, in_reward), f"{a.kl_estimator} is not supported with kl_in_reward; set it to k1")
        )
    if a.kl_in_reward and a.use_bias_correction_kl:
        said = "true corrects a KL term in the loss, but with kl_in_reward the loss has none; set it to false"
        problems.append(Problem(("algorithm.use_bias_correction_kl", in_reward), said))
    if a.kl_in_reward and a.multi_objective_aggregation == "normalize_then_sum":
        said = (
            "true changes the summed reward, but normalize_then_sum normalizes each function separately; choose "
            "sum_then_normalize"
        )
        problems.append(Problem((in_reward, "algorithm.multi_objective_aggregation"), said))
    return problems


def loss_problems(a: AlgorithmSection) -> list[Problem]:
    """Return options of the loss that have no effect, or contradict each other."""
    problems, key, loss = [], "algorithm.loss_type", a.loss
    if a.delta is not None and loss.clips != "ratio" and not loss.custom:
        clipped = ", ".join(name for name, row in LOSSES.items() if row.clips == "ratio")
        said = f"{a.delta:g} has no effect with loss_type {a.loss_type}; leave it empty, or choose one of {clipped}"
        problems.append(Problem(("algorithm.delta", key), said))
    if loss.clips == "weight" and a.epsilon_high is None:
        problems.append(
            Problem(
                ("algorithm.epsilon_high", key), f"loss_type {a.loss_type} needs it as largest weight; ScaleRL uses 5.0"
            )
        )
    if a.loss_average is not None and not loss.custom:
        said = (
            f"{a.loss_average} only applies to a custom loss, but loss_type {a.loss_type} averages by "
            f"{loss.average}; leave it empty"
        )
        problems.append(Problem(("algorithm.loss_average", key), said))
    if loss.own_ratio and a.importance_sampling_level != "token":
        said = (
            f"{a.importance_sampling_level} is not supported: loss_type {a.loss_type} has its own sequence ratio; "
            f"set it to token"
        )
        problems.append(Problem(("algorithm.importance_sampling_level", key), said))
    if loss.whole_step:
        problems += _whole_step_problems(a)
    if a.use_adaptive_entropy and a.entropy_coef_min > a.entropy_coef_max:
        keys = ("algorithm.entropy_coef_min", "algorithm.entropy_coef_max", "algorithm.use_adaptive_entropy")
        problems.append(Problem(keys, f"{a.entropy_coef_min} is above entropy_coef_max {a.entropy_coef_max}; lower it"))
    return problems if a.importance_correction == "off" else problems + _correction_problems(a)


def _whole_step_problems(a: AlgorithmSection) -> list[Problem]:
    """Return options of tokens and sequences that contradict a loss over the responses of a group."""
    name, key = a.loss_type, "algorithm.loss_type"
    problems = [
        Problem(
            (f"algorithm.{option}", key), f"{value} is not supported: {name} compares whole responses of a group; {fix}"
        )
        for option, value, neutral, fix in (
            ("importance_correction", a.importance_correction, "off", "set it to off"),
            ("off_policy_mask_threshold", a.off_policy_mask_threshold, None, "leave it empty"),
            ("top_entropy_quantile", a.top_entropy_quantile, 1.0, "set it to 1.0"),
        )
        if value != neutral
    ]
    if a.steps_per_generation > 1:
        said = (
            f"{a.steps_per_generation} optimizer steps split groups, but loss_type {name} compares whole groups; "
            f"set it to 1"
        )
        problems.append(Problem(("algorithm.steps_per_generation", key), said))
    return problems


def _correction_problems(a: AlgorithmSection) -> list[Problem]:
    """Return what contradicts an importance correction, and a missing or empty band."""
    key, problems = "algorithm.importance_correction", []
    correction, low, high = a.importance_correction, a.importance_correction_min, a.importance_correction_max
    if a.loss.own_correction and not correction.startswith("token"):
        said = (
            f"{correction} counts token weights twice, because {a.loss_type} sums them too; choose token_truncate "
            f"or token_mask"
        )
        problems.append(Problem((key, "algorithm.loss_type"), said))
    if low is None and high is None:
        said = f"{correction} needs a band; set importance_correction_min, importance_correction_max or both"
        problems.append(Problem((key, f"{key}_min", f"{key}_max"), said))
    elif low is not None and high is not None and low >= high:
        said = f"{low} is not below importance_correction_max {high}; lower it"
        problems.append(Problem((f"{key}_min", f"{key}_max", key), said))
    return problems


def advantage_problems(a: AlgorithmSection) -> list[Problem]:
    """Return normalizations of rewards that exclude each other."""
    problems, estimator, scale = [], "algorithm.advantage_estimator", "algorithm.scale_rewards"
    if a.advantage_estimator.startswith("reinforce_plus_plus") and a.scale_rewards != "batch":
        said = (
            f"{a.scale_rewards}, but advantage_estimator {a.advantage_estimator} divides by the batch's std; set "
            f"it to batch"
        )
        problems.append(Problem((scale, estimator), said))
    if a.multi_objective_aggregation == "normalize_then_sum" and (a.advantage_estimator, a.scale_rewards) != (
        "grpo",
        "group",
    ):
        said = (
            "normalize_then_sum normalizes within groups, then over the batch; set advantage_estimator grpo and "
            "scale_rewards group"
        )
        problems.append(Problem(("algorithm.multi_objective_aggregation", estimator, scale), said))
    return problems


def fp8_problems(config: RunConfig) -> list[Problem]:
    """Return FP8 options without an FP8 recipe, and adapters with an FP8 recipe, because their linears cannot multiply
    in FP8."""
    m, recipe = config.model, "model.fp8_recipe"
    problems = [
        Problem(
            (f"model.{key}", recipe),
            f"{value} only applies to scales with a history, but model.fp8_recipe is {m.fp8_recipe}; choose delayed, "
            f"or leave it out",
        )
        for key, value in m.history_keys.items()
        if m.fp8_recipe != "delayed"
    ]
    if m.fp8_recipe != "none":
        why = "is not supported with LoRA: linears with an adapter multiply in model.precision"
        adapted = Problem((recipe, "lora.rank"), f"{m.fp8_recipe} {why}; choose none, or set lora.rank to 0")
        return problems + [adapted] * config.lora.enabled + (_fp8_param_problems(config) if m.fp8_param else [])
    said: dict[str, object] = {
        "model.fp8_format": m.fp8_format != "auto" and m.fp8_format,
        "model.bf16_layers": m.bf16_layers,
    }
    said |= {f"model.{key}": getattr(m, key) and "true" for key in ("moe_router_padding_for_quantization", "fp8_param")}
    return problems + [
        Problem(
            (key, recipe),
            f"{value} only applies with FP8, but model.fp8_recipe is none; choose a recipe, or leave it out",
        )
        for key, value in said.items()
        if value
    ]


def _fp8_param_problems(config: RunConfig) -> list[Problem]:
    """Return options that contradict FP8 weights between steps."""
    m, t, key, problems = config.model, config.train, "model.fp8_param", []
    if m.fp8_recipe in ("delayed", "mxfp8"):
        said = f"true does not support model.fp8_recipe {m.fp8_recipe}; choose tensorwise or blockwise"
        problems.append(Problem((key, "model.fp8_recipe"), said))
    if m.precision == "fp32":
        said = (
            "true needs float32 masters, but model.precision is fp32, which has no masters; set model.precision to bf16"
        )
        problems.append(Problem((key, "model.precision"), said))
    if t.optimizer == "muon":
        said = (
            "true needs sharded masters, but train.optimizer muon keeps whole ones; set it to false, or "
            "train.optimizer to adam"
        )
        problems.append(Problem((key, "train.optimizer"), said))
    elif not t.distributed_optimizer:
        said = "true requires train.distributed_optimizer: true"
        problems.append(Problem((key, "train.distributed_optimizer"), said))
    if config.algorithm.sync_ref_model:
        said = "true rounds away small updates of the reference; set algorithm.sync_ref_model to false"
        problems.append(Problem((key, "algorithm.sync_ref_model"), said))
    return problems


def quantization_problems(config: RunConfig) -> list[Problem]:
    """Return the problem of quantized rollouts without importance correction."""
    r, a, key = config.rollout, config.algorithm, "rollout.quantization"
    problems: list[Problem] = []
    if r.quantization == "none":
        return problems
    samples = f"{r.quantization} samples from a different distribution than the trainer's, but"
    if a.loss.whole_step:
        said = f"{samples} loss_type {a.loss_type} has no importance correction; set quantization to none"
        problems.append(Problem((key, "algorithm.loss_type"), said))
    elif a.importance_correction == "off":
        said = (
            f"{samples} algorithm.importance_correction is off; set the correction to token_truncate, or "
            f"quantization to none"
        )
        problems.append(Problem((key, "algorithm.importance_correction"), said))
    return problems


def optimizer_problems(config: RunConfig) -> list[Problem]:
    """Return options that Muon does not support, a bucket size without overlap, and a final learning rate above the
    peak."""
    t, problems, optimizer = config.train, [], "train.optimizer"
    if t.ddp_bucket_size is not None and t.overlap_grad_reduce is False:
        said = f"{t.ddp_bucket_size} only applies with train.overlap_grad_reduce, which is false; leave one of them out"
        problems.append(Problem(("train.ddp_bucket_size", "train.overlap_grad_reduce"), said))
    if t.min_learning_rate > t.learning_rate:
        said = f"{t.min_learning_rate} is above train.learning_rate {t.learning_rate}; lower it"
        problems.append(Problem(("train.min_learning_rate", "train.learning_rate"), said))
    if t.optimizer != "muon":
        return problems
    if t.distributed_optimizer:
        said = (
            "true shards matrices, but train.optimizer muon needs whole matrices on every data-parallel rank; set "
            "it to false"
        )
        problems.append(Problem(("train.distributed_optimizer", optimizer), said))
    if config.lora.enabled:
        problems.append(
            Problem((optimizer, "lora.rank"), "muon does not support adapters (lora.rank > 0); choose adam")
        )
    if t.optimizer_state_dtype != "fp32" or t.optimizer_offload:
        said = (
            "train.optimizer muon keeps its momentum in fp32 on the device; set it to fp32, and optimizer_offload "
            "to false"
        )
        problems.append(Problem(("train.optimizer_state_dtype", "train.optimizer_offload", optimizer), said))
    return problems
