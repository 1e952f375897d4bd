"""Checks the rules that span several fields of the configuration."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from pydantic import ValidationError

from megagrpo.config.basics.paths import is_user_code, path_problems
from megagrpo.config.basics.problems import Problem
from megagrpo.config.rules.algorithm_rules import (
    advantage_problems,
    ahead_problems,
    critic_problems,
    kl_problems,
    loss_problems,
    quantization_problems,
    role_problems,
    turn_problems,
)
from megagrpo.config.rules.extra_args import extra_args_problems, options_of
from megagrpo.config.rules.overlap_rules import overlap_problems
from megagrpo.config.rules.row_rules import kept_problems, row_problems
from megagrpo.config.rules.task_rules import task_problems
from megagrpo.config.rules.teacher_rules import teacher_problems
from megagrpo.config.rules.tower_rules import tower_problems
from megagrpo.config.sections.data import RENDERER_ARGUMENTS
from megagrpo.config.sections.evaluation import evaluation_problems
from megagrpo.config.sections.lora import lora_problems
from megagrpo.config.sections.multi_turn import multi_turn_problems
from megagrpo.config.sections.placement import nearest_divisor, placement_problems
from megagrpo.config.sections.rewards import judge_problems
from megagrpo.config.sections.tracker_options import tracker_problems

if TYPE_CHECKING:
    from megagrpo.config import RunConfig

MOST_SAMPLES = 10_000_000  # limit per step: a few processes hold all tokens and rewards in memory
PROCESSED = tuple(
    f"rollout.{name}" for name in ("logit_bias", "allowed_token_ids", "repetition_penalty", "structured_outputs")
)
LONGEST_SAMPLE = ("rollout.max_prompt_length", "rollout.max_completion_length", "multi_turn.max_response_length")


def cross_field_problems(config: RunConfig) -> list[Problem]:
    """Return the problems of fields that are each valid but contradict each other. Pure function of the config."""
    of_algorithm = (kl_problems(config), loss_problems(config.algorithm), advantage_problems(config.algorithm))
    of_policy = (lora_problems(config), fp8_problems(config), quantization_problems(config), layout_problems(config))
    of_steps = (length_problems(config), step_problems(config), optimizer_problems(config), fused_problems(config))
    of_rollout = (data_problems(config), stop_problems(config), sampling_problems(config), evaluation_problems(config))
    others = (
        task_problems(config),
        ahead_problems(config),
        extra_args_problems(config),
        tracker_problems(config),
        path_problems(config),
    )
    own = (
        placement_problems(config),
        multi_turn_problems(config.multi_turn),
        judge_problems(config),
        critic_problems(config),
        turn_problems(config),
        role_problems(config.algorithm, config.multi_turn.roles),
        teacher_problems(config),
        source_problems(config),
        replay_problems(config),
        kept_problems(config),
        router_problems(config),
        overlap_problems(config),
        image_problems(config),
        tower_problems(config),
        row_problems(config),
    )
    found: list[Problem] = []
    for group in (*of_algorithm, *own, *of_policy, *of_steps, *of_rollout, *others):
        with suppress(ValidationError):  # of a task: `load_config` names it with the task
            for problem in group:
                found.append(problem)
    return found


def image_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield what does not work with images in prompts."""
    data, key = config.data, "data.images"
    if not data.images:
        return
    refused: dict[str, tuple[bool, str]] = {
        "multi_turn.agent": (config.multi_turn.agent is not None, "agents send text only; use tools or an environment"),
        "train.overlap": (
            "experts" in config.train.overlap,
            "its schedule runs two micro-batches at once, whose images would be mixed up; leave experts out",
        ),
        "data.chat_template": (data.chat_template == "none", "only a template places images; set one"),
        "data.overlong_prompts": (
            data.overlong_prompts == "truncate_left",
            "a truncated prompt would lose part of its images; choose drop or error",
        ),
    }
    for other, (wrong, reason) in refused.items():
        if wrong:
            yield Problem((other, key), f"with data.images, {reason}")


def layout_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield sizes of the parallel layout that contradict each other."""
    p = config.parallel
    if p.sequence_parallel and p.tp == 1:
        keys: tuple[str, ...] = ("parallel.sequence_parallel", "parallel.tp")
        yield Problem(keys, "true needs parallel.tp > 1; set it to false, or raise tp")
    if p.vpp > 1 and p.pp == 1:
        reason = f"{p.vpp} needs parallel.pp > 1; set vpp to 1 or raise pp"
        yield Problem(("parallel.vpp", "parallel.pp"), reason)
    if p.pipeline_layers is not None and len(p.pipeline_layers) != p.pp * p.vpp:
        reason = f"{p.pipeline_layers} has {len(p.pipeline_layers)} number(s)"
        cause = f"pp {p.pp} x vpp {p.vpp} = {p.pp * p.vpp} stages"
        keys = ("parallel.pipeline_layers", "parallel.pp", "parallel.vpp")
        yield Problem(keys, f"{reason}, but {cause}; give one number of layers per stage")
    yield from server_layout_problems(config)


def server_layout_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield sizes of a vLLM server that contradict each other."""
    r, experts = config.rollout, "rollout.enable_expert_parallel"
    if r.enable_expert_parallel and r.tp * r.dp == 1:
        reason = "true needs several workers per server, but rollout.tp and rollout.dp are 1"
        yield Problem((experts, "rollout.tp", "rollout.dp"), f"{reason}; set it to false, or raise tp or dp")
    if r.dp > 1 and not r.enable_expert_parallel:
        reason = f"{r.dp} copies of the attention share experts, but {experts} is false"
        yield Problem(("rollout.dp", experts), f"{reason}; set it to true, or use more rollout.servers")
    # vLLM passes on the reports of the first copy only
    if r.dp > 1 and r.placed == "colocated" and config.run.nodes > 1:
        reason = (
            f"needs servers whose reports the trainer can read, but colocated servers are on {config.run.nodes} nodes"
        )
        keys, fix = ("rollout.dp", "rollout.placement", "run.nodes"), "choose dedicated, or set dp to 1"
        yield Problem(keys, f"{r.dp} {reason}; {fix}")
    if r.dp > 1 and config.lora.syncs_adapters:
        reason = f"{r.dp}, but lora.sync is adapter: copies of vLLM drop their adapters while they have no request"
        yield Problem(("rollout.dp", "lora.sync"), f"{reason}; set dp to 1, or lora.sync to merged")


def length_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield limits in tokens that are smaller than what they must hold."""
    r, m, t = config.rollout, config.multi_turn, config.train
    if m.max_response_length is not None and m.max_response_length < r.max_completion_length:
        reason = (
            f"{m.max_response_length} is less than one turn, rollout.max_completion_length {r.max_completion_length}"
        )
        fix = "raise it, or lower the turn's limit"
        yield Problem(("multi_turn.max_response_length", "rollout.max_completion_length"), f"{reason}; {fix}")
    if config.max_model_len > t.max_tokens_per_micro_batch:
        longest = f"rollout.max_prompt_length {r.max_prompt_length} + {config.response_limit} = {config.max_model_len}"
        reason = f"{t.max_tokens_per_micro_batch} is less than the longest sample, {longest}"
        keys = ("train.max_tokens_per_micro_batch", *LONGEST_SAMPLE)
        yield Problem(keys, f"{reason}; raise it, or shorten the sample")
    if t.share_prompts and "rope" in config.model.fusions:
        reason = "true lets positions continue a prompt's, but the fused rotation of model.fusions begins at 0"
        fix = "leave rope out, or share_prompts empty"
        yield Problem(("train.share_prompts", "model.fusions"), f"{reason}; {fix}")


def step_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield numbers of samples and steps that contradict each other."""
    r, a, t, run = config.rollout, config.algorithm, config.train, config.run
    own = [size for task in config.tasks if isinstance(size := task.rollout.get("num_generations"), int)]
    group, slices = max(r.num_generations, *own, 0), a.steps_per_generation
    samples = r.prompts_per_step * group
    if samples > MOST_SAMPLES:
        reason = f"{r.prompts_per_step} x num_generations {group} = {samples} samples"
        fix = f"the limit per step is {MOST_SAMPLES}; lower one of them"
        yield Problem(("rollout.prompts_per_step", "rollout.num_generations"), f"{reason}; {fix}")
    elif samples % slices and not own:  # else the number of samples differs between steps
        factors = ("algorithm.steps_per_generation", "rollout.prompts_per_step", "rollout.num_generations")
        product = f"rollout.prompts_per_step {r.prompts_per_step} x num_generations {r.num_generations}"
        reason = f"{slices} does not divide the step's {samples} samples, {product}"
        yield Problem(factors, f"{reason}; use {nearest_divisor(samples, slices)}")
    if t.warmup_steps and t.warmup_ratio:
        reason = f"{t.warmup_ratio:g} and train.warmup_steps {t.warmup_steps} both set the warm-up"
        yield Problem(("train.warmup_ratio", "train.warmup_steps"), f"{reason}; set one of them to 0")
    if run.max_steps is None and run.num_train_epochs is not None:
        return  # the number of steps depends on the data; `RunConfig.with_num_prompts` checks the rest
    optimizer_steps = run.num_steps * a.updates_per_step
    if t.warmup_steps > optimizer_steps:
        keys = ("train.warmup_steps", "run.max_steps", "algorithm.num_iterations", "algorithm.steps_per_generation")
        reason = f"{t.warmup_steps} exceeds the run's {optimizer_steps} optimizer steps"
        yield Problem(keys, f"{reason}; lower it, or raise run.max_steps")
    for key, steps in (("debug.dump_steps", config.debug.dump_steps), ("run.profile.steps", run.profile.steps)):
        if late := [step for step in steps if step > run.num_steps]:
            reason = f"step {late[0]} is after the last step, run.max_steps {run.num_steps}; name an earlier step"
            yield Problem((key, "run.max_steps"), reason)


def data_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield a run without rewards, an empty curriculum interval, and variables that the chat template cannot get."""
    d, m = config.data, config.multi_turn
    if config.tasks:  # each is checked with its own values
        return
    if taken := [name for name in d.chat_template_kwargs if name in RENDERER_ARGUMENTS]:
        reason = f"`{taken[0]}` is an argument of the renderer, not a variable of the template; leave it out"
        yield Problem((f"data.chat_template_kwargs.{taken[0]}",), reason)
    if d.chat_template_kwargs and d.chat_template == "none":
        reason = "has no effect, because data.chat_template is none; leave one of them out"
        yield Problem(("data.chat_template_kwargs", "data.chat_template"), reason)
    has_rewards = config.rewards.functions or m.scheduler or m.environment or m.agent or config.algorithm.teacher
    if not has_rewards and config.algorithm.loss.generates:
        keys = ("rewards.functions", "multi_turn.scheduler", "multi_turn.environment", "multi_turn.agent")
        reason = "the run has no rewards; name a function, or a scheduler, environment or agent that gives rewards"
        yield Problem(keys, reason)
    choice, names = config.algorithm.dynamic_sample, config.rewards.names
    deciding = {*names} - config.rewards.penalties if choice == "outcome" else {*names} & {choice}
    if isinstance(choice, str) and not deciding and not (m.scheduler or m.environment or m.agent):
        reason = f"`{choice}` names none of the rewards {', '.join(names)}; name one, or set true or outcome"
        if choice == "outcome":
            reason = f"outcome leaves out penalties, and all rewards are: {', '.join(names)}; name one, or set true"
        yield Problem(("algorithm.dynamic_sample", "rewards.functions"), reason)
    if m.agent and d.system_prompt is not None:
        reason = "has no effect on an agent, which writes its messages itself; leave one of them out"
        yield Problem(("data.system_prompt", "multi_turn.agent"), reason)
    if d.curriculum != sorted(d.curriculum):
        yield Problem(("data.curriculum",), f"{d.curriculum} is an empty interval; swap the two")


def source_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield a data source that is no user code, and settings that a data source replaces."""
    data, key, run = config.data, "data.source", config.run
    if data.source is None:
        if data.source_args:
            yield Problem(("data.source_args", key), "has no effect without data.source; name a class, or leave it out")
        return
    if not is_user_code(data.source):
        yield Problem((key,), f"`{data.source}` is no class; write path/file.py:Class or package.module:Class")
    if data.curriculum:
        reason = f"{data.curriculum} chooses prompts, and data.source chooses them already; leave one of them out"
        yield Problem(("data.curriculum", key), reason)
    if not data.shuffle:
        yield Problem(("data.shuffle", key), "false has no effect: data.source decides the order; leave it out")
    if run.num_train_epochs is not None:
        reason = "data.source decides how often a row is drawn, so an epoch has no length; set run.max_steps instead"
        yield Problem(("run.num_train_epochs", key), reason)


def stop_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield a text option without stop strings."""
    r, key = config.rollout, "rollout.stop"
    if not r.stop and not r.include_stop_str_in_output and not config.data.sampling_column:
        reason = "false has no effect without rollout.stop; name texts that end a response, or leave it out"
        yield Problem(("rollout.include_stop_str_in_output", key), reason)


def sampling_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield options that contradict sampling parameters of rows, and changed logits."""
    r = config.rollout
    if config.data.sampling_column and config.train.fused_logprobs:
        reason = "gives tokens their own temperature, but the kernels of train.fused_logprobs have one for all"
        yield Problem(("data.sampling_column", "train.fused_logprobs"), f"{reason}; set fused_logprobs to false")
    if r.processes_logits and config.train.fused_logprobs:
        reason = f"true writes no logits, which {', '.join(PROCESSED)} change; set it to false"
        yield Problem(("train.fused_logprobs", *PROCESSED), reason)
    yield from thinking_problems(config)
    key = "rollout.structured_outputs"
    if r.structured_outputs and r.max_staleness and (r.in_flight == "resume" or config.lora.syncs_adapters):
        reason = "starts again with each request, but an interrupted response is requested again with its tokens as"
        keys = (key, "rollout.in_flight", "rollout.max_staleness", "lora.sync")
        yield Problem(keys, f"{reason} the prompt (rollout.in_flight {r.in_flight}); choose keep, or leave it out")
    if r.structured_outputs and "--reasoning-parser" in options_of(r.extra_args):
        reason = "vLLM would begin after a thought, and the trainer cannot know where; leave --reasoning-parser out"
        yield Problem((key, "rollout.extra_args"), reason)


def thinking_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield budgets of thoughts without effect, and structured outputs, which vLLM begins again after one."""
    r, key, end = config.rollout, "rollout.max_thinking_tokens", "rollout.thinking_end"
    if r.thinking_end and r.max_thinking_tokens is None:
        yield Problem((end, key), "has no effect without rollout.max_thinking_tokens; set it, or leave it out")
    if r.max_thinking_tokens and r.max_thinking_tokens >= r.max_completion_length:
        limit = f"rollout.max_completion_length {r.max_completion_length}"
        yield Problem((key, "rollout.max_completion_length"), f"{r.max_thinking_tokens} is not below {limit}; lower it")
    if r.max_thinking_tokens and r.structured_outputs:
        reason = f"starts again with each request, and a thought's end begins one ({key}); leave one of the two out"
        yield Problem(("rollout.structured_outputs", key), reason)


def replay_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield settings with which there are no routes to replay."""
    r, key = config.rollout, "rollout.routing_replay"
    if r.routing_replay == "engine" and r.pp > 1:
        reason = f"engine needs the routes of all layers, and vLLM does not return them with rollout.pp {r.pp}"
        yield Problem((key, "rollout.pp"), f"{reason}; set pp to 1 and raise tp, or choose trainer")
    if r.routing_replay == "engine" and "--no-enable-prefix-caching" in options_of(r.extra_args):
        reason = "engine: vLLM keeps routes with the blocks of its prefix cache, and rollout.extra_args disables it"
        yield Problem((key, "rollout.extra_args"), f"{reason}; leave --no-enable-prefix-caching out")
    if r.routing_replay == "trainer" and config.algorithm.updates_per_step == 1:
        reason = "trainer replays the routes of the old log-probs, but a step has one optimizer step, which computes"
        keys = (key, "algorithm.num_iterations", "algorithm.steps_per_generation")
        yield Problem(keys, f"{reason} them itself; raise one of the others, or choose engine or off")


def router_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield settings that train and freeze routers at the same time."""
    frozen, rate = "train.freeze_moe_router", "algorithm.moe_router_bias_update_rate"
    if config.train.freeze_moe_router and config.lora.enabled:
        yield Problem((frozen, "lora.rank"), "true has no effect: adapters leave routers frozen; set it to false")
    if config.algorithm.moe_router_bias_update_rate and (config.train.freeze_moe_router or config.lora.enabled):
        other, fix = (frozen, "set it to false") if config.train.freeze_moe_router else ("lora.rank", "set it to 0")
        value = f"{config.algorithm.moe_router_bias_update_rate:g}"
        yield Problem((rate, other), f"{value} changes routers, but {other} freezes them; {fix}, or the rate to 0")


def fused_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield options that the fused log-probs do not support, and options that need them."""
    t, r, a = config.train, config.rollout, config.algorithm
    if t.fused_logprobs and r.truncates:
        reason = "true writes no logits, which rollout.top_p, top_k and min_p need; set it to false"
        yield Problem(("train.fused_logprobs", "rollout.top_p", "rollout.top_k", "rollout.min_p"), reason)
    elif t.fused_logprobs and a.full_kl and a.beta:
        reason = f"true writes no logits, which kl_estimator {a.kl_estimator} needs; set it to false"
        yield Problem(("train.fused_logprobs", "algorithm.kl_estimator", "algorithm.beta"), reason)
    if t.logprobs_fp8_recipe != "none" and not t.fused_logprobs:
        reason = f"{t.logprobs_fp8_recipe} needs the fused kernels; choose none, or set train.fused_logprobs to true"
        yield Problem(("train.logprobs_fp8_recipe", "train.fused_logprobs"), reason)


def fp8_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield FP8 options without an FP8 recipe, and options that fp16 or adapters exclude."""
    m, recipe = config.model, "model.fp8_recipe"
    if m.precision == "fp16":
        for key, value in ((recipe, m.fp8_recipe), ("model.base_storage", m.base_storage)):
            if value != "none":
                yield Problem(("model.precision", key), f"fp16 does not support {key} {value}; choose none, or bf16")
        if (quantization := config.rollout.quantization) != "none":
            reason = f"vLLM computes rollout.quantization {quantization} in bf16; choose none, or set precision to bf16"
            yield Problem(("model.precision", "rollout.quantization"), reason)
    if m.fp8_recipe != "none" and config.lora.enabled:
        yield from _fp8_lora_problems(config)
    if m.fp8_recipe != "none" and m.fp8_param:
        yield from _fp8_param_problems(config)
    if m.fp8_recipe == "none":
        idle: dict[str, object] = {
            "bf16_layers": m.bf16_layers,
            "fp8_param": m.fp8_param and "true",
        }
        reason = "only applies with FP8, but model.fp8_recipe is none; choose a recipe, or leave it out"
        for key, setting in idle.items():
            if setting:
                yield Problem((f"model.{key}", recipe), f"{setting} {reason}")


def _fp8_lora_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield options that contradict adapters beside products in FP8."""
    m, recipe = config.model, "model.fp8_recipe"
    if config.lora.in_experts:
        reason = f"{m.fp8_recipe} multiplies experts in groups, without adapters; leave lora.target_parameters empty"
        yield Problem((recipe, "lora.target_parameters"), f"{reason}, or choose none")
    if m.base_storage != "none":
        reason = f"{m.fp8_recipe} rounds weights that model.base_storage {m.base_storage} has rounded; choose none"
        yield Problem((recipe, "model.base_storage"), f"{reason} for one of them")
    if m.fp8_param:
        reason = "true rounds trained weights from masters, but lora.rank freezes them; set it to false"
        yield Problem(("model.fp8_param", "lora.rank"), reason)


def _fp8_param_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield options that contradict FP8 weights between steps."""
    m, t, key = config.model, config.train, "model.fp8_param"
    if m.fp8_recipe == "mxfp8":
        reason = f"true does not support model.fp8_recipe {m.fp8_recipe}; choose tensorwise or blockwise"
        yield Problem((key, "model.fp8_recipe"), reason)
    if m.precision == "fp32":
        reason = "true needs float32 masters, but model.precision is fp32, which has no masters"
        yield Problem((key, "model.precision"), f"{reason}; set model.precision to bf16")
    if t.optimizer == "muon":
        reason = "true needs sharded masters, but train.optimizer muon keeps whole ones"
        yield Problem((key, "train.optimizer"), f"{reason}; set it to false, or train.optimizer to adam")
    elif not t.distributed_optimizer:
        reason = "true requires train.distributed_optimizer: true"
        yield Problem((key, "train.distributed_optimizer"), reason)
    if config.algorithm.sync_ref_model:
        reason = "true rounds away small updates of the reference; set algorithm.sync_ref_model to false"
        yield Problem((key, "algorithm.sync_ref_model"), reason)


def optimizer_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield options that Muon or an own optimizer does not support, a bucket size without overlap, and options of the
    learning rate without effect or above the peak."""
    t, optimizer = config.train, "train.optimizer"
    if t.ddp_bucket_size is not None and t.overlap_grad_reduce is False:
        reason = f"{t.ddp_bucket_size} only applies with train.overlap_grad_reduce, which is false"
        yield Problem(("train.ddp_bucket_size", "train.overlap_grad_reduce"), f"{reason}; leave one of them out")
    if t.min_learning_rate > t.learning_rate:
        reason = f"{t.min_learning_rate} is above train.learning_rate {t.learning_rate}; lower it"
        yield Problem(("train.min_learning_rate", "train.learning_rate"), reason)
    if t.own_schedule and (t.warmup_steps or t.warmup_ratio or t.min_learning_rate):
        keys = ("train.warmup_steps", "train.warmup_ratio", "train.min_learning_rate", "train.lr_scheduler_type")
        yield Problem(
            keys, "your own schedule returns the whole learning rate, so these have no effect; leave them out"
        )
    if t.optimizer_args and not t.own_optimizer:
        reason = f"has no effect on train.optimizer {t.optimizer}; leave it out, or name your own optimizer"
        yield Problem(("train.optimizer_args", optimizer), reason)
    if t.optimizer == "adam":
        return
    name = "muon" if t.optimizer == "muon" else "your own"
    if t.distributed_optimizer:
        reason = f"true shards matrices, but train.optimizer {name} needs whole matrices on every data-parallel rank"
        yield Problem(("train.distributed_optimizer", optimizer), f"{reason}; set it to false")
    if config.lora.enabled and t.optimizer == "muon":
        yield Problem((optimizer, "lora.rank"), "muon does not support adapters (lora.rank > 0); choose adam")
    if t.optimizer_state_dtype != "fp32" or t.optimizer_offload:
        reason = f"train.optimizer {name} keeps its {'momentum' if name == 'muon' else 'state'} in fp32 on the device"
        fix = "set it to fp32, and optimizer_offload to false"
        yield Problem(("train.optimizer_state_dtype", "train.optimizer_offload", optimizer), f"{reason}; {fix}")
