"""The whole configuration of a run: typed sections, one YAML loader, one list of problems.

`load_config(path, overrides)` reads a YAML file, follows its `defaults:` chain, applies dotted overrides (`train.learning_rate=1e-5`) and
returns a frozen `RunConfig`, or raises one `ConfigError` that lists every problem at once. Importing this module needs pydantic and
PyYAML only, so a login node can check a run. What needs the model's own `config.json` is checked in `plan.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from megagrpo import config_io
from megagrpo.config_io import ConfigError as ConfigError

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(gt=0, le=1)]


class Section(BaseModel):
    """Frozen, strict about keys, documented by the string below each field."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class RunSection(Section):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "grpo"
    """Name of the run; its files go to `output_dir/name`."""
    output_dir: str = "runs"
    """Folder that holds the runs."""
    seed: NonNegativeInt = 42
    """Seeds the prompt order, the sampling requests and torch."""
    deterministic: bool = False
    """Compute the same bits in every run of one seed and layout, on GPUs too, where that is slower (docs/audit.md). On a CPU they are the
    same anyway."""
    max_steps: PositiveInt = 100
    """Outer iterations: generate, score, train, sync."""
    save_steps: NonNegativeInt = 0
    """Write a checkpoint every so many steps; 0 writes one at the end only."""
    save_total_limit: PositiveInt = 2
    """How many checkpoints to keep; the oldest are deleted after a newer one is complete."""
    resume: bool = False
    """Continue from the newest complete checkpoint of this run (also `--resume`); an error when there is none."""
    overwrite: bool = False
    """Allow a fresh start in a run folder that already holds metrics or checkpoints: what is there is moved aside."""
    log_completions_steps: NonNegativeInt = 1
    """Print a sample completion every so many steps; 0 never prints. `completions.jsonl` always holds all of them."""
    tensorboard: bool = True
    """Write TensorBoard events to the run folder."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Send metrics to Weights & Biases; `offline` needs no account and can be synced later."""


class ModelSection(Section):
    path: str
    """Policy weights: a Hugging Face folder, a hub name, or `package:NAME` for GGUF weights that an installed Python package carries."""
    tokenizer: str | None = None
    """Tokenizer folder, hub name, or a bare SentencePiece `.model` file; the model's own when empty."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """Compute precision. bf16 keeps fp32 master weights. auto: bf16 on a GPU and on CPUs with bf16 instructions, fp32 on others."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Recompute activations in the backward pass: `selective` the core attention, `full` every layer."""


class ParallelSection(Section):
    tp: PositiveInt = 1
    """Tensor-parallel size."""
    pp: PositiveInt = 1
    """Pipeline-parallel size."""
    vpp: PositiveInt = 1
    """Virtual pipeline stages per rank (interleaved schedule); needs pp > 1."""
    pipeline_layers: list[PositiveInt] | None = None
    """Decoder layers of each pipeline stage in model order, pp x vpp numbers; as many on each when empty. Fewer on the first and the last
    stage make room for the embedding and the LM head."""
    cp: PositiveInt = 1
    """Context-parallel size: cuts every sequence into 2 x cp chunks and gives each rank two of them, so that a rank holds 1/cp of the
    tokens."""
    ep: PositiveInt = 1
    """Expert-parallel size: ranks that share out the experts of a mixture-of-experts model. They are ranks that tp and dp have already,
    regrouped for the experts, so ep needs none of its own."""
    etp: PositiveInt | None = None
    """Tensor-parallel size inside each expert; `tp` when empty."""
    sequence_parallel: bool = False
    """Shard norms and residuals over the tensor-parallel group along the sequence; needs tp > 1."""
    timeout_minutes: PositiveFloat = 30.0
    """A collective that waits longer than this fails with an error instead of hanging."""

    @property
    def model_parallel_size(self) -> int:
        """Ranks of one replica: they work on the same micro-batches."""
        return self.tp * self.cp * self.pp

    @property
    def sequence_align(self) -> int:
        """Every packed sequence is padded to a multiple of this many tokens, so that it can be cut into 2 x cp equal chunks."""
        return 2 * self.cp if self.cp > 1 else 1

    @property
    def micro_batch_align(self) -> int:
        """Every micro-batch is padded to a multiple of this many tokens: sequence parallelism cuts each context-parallel rank's part."""
        return self.sequence_align * (self.tp if self.sequence_parallel else 1)

    @property
    def expert_tp(self) -> int:
        """Ranks that hold one expert together."""
        return self.etp or self.tp

    @property
    def expert_parallel_size(self) -> int:
        """Ranks that hold one copy of all experts."""
        return self.ep * self.expert_tp * self.pp

    @property
    def smallest_world(self) -> int:
        """The fewest ranks that make whole replicas and whole sets of experts."""
        return lcm(self.model_parallel_size, self.expert_parallel_size)


class AlgorithmSection(Section):
    loss_type: Literal["grpo", "dapo", "dr_grpo", "bnpo"] = "dapo"
    """How token losses are averaged: grpo by sequence then batch, dapo and bnpo by token, dr_grpo by sequences x max_completion_length."""
    beta: NonNegativeFloat = 0.0
    """Weight of the KL penalty to the reference model; 0 builds no reference."""
    kl_estimator: Literal["k1", "k2", "k3", "abs", "low_var", "full_forward", "full_reverse"] = "k3"
    """The KL term of a token: estimated from its log-probs, or exact over the whole vocabulary, forward KL(ref || policy) or reverse
    KL(policy || ref). Estimators differ in their gradient more than in their value: docs/kl.md."""
    use_bias_correction_kl: bool = False
    """Multiply the estimate by the probability ratio, gradient included: its gradient then averages to that of KL(policy || ref)."""
    epsilon: NonNegativeFloat = 0.2
    """Lower clip range of the probability ratio."""
    epsilon_high: NonNegativeFloat | None = None
    """Upper clip range; `epsilon` when empty."""
    router_aux_loss_coef: NonNegativeFloat = 0.0
    """Weight of the load-balancing loss of a mixture of experts, as transformers defines it, over the step's response tokens together: the
    same in every layout. Above 0 it takes one more forward pass per optimizer step."""
    num_iterations: PositiveInt = 1
    """Optimizer steps on each batch of rollouts."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """What the centred rewards are divided by: the group's std, the batch's std, or nothing."""
    skip_zero_advantage: bool = True
    """Leave samples whose advantage is exactly 0 out of the forward and backward pass when beta and router_aux_loss_coef are 0: their
    gradient is 0. They still count in every denominator, so the update is the same."""

    @property
    def full_kl(self) -> bool:
        """Whether the KL term is exact over the whole vocabulary."""
        return self.kl_estimator.startswith("full_")

    @property
    def leaves_out_zero_advantage(self) -> bool:
        """Whether samples without advantage are not computed."""
        return self.skip_zero_advantage and not self.beta and not self.router_aux_loss_coef


class RolloutSection(Section):
    prompts_per_step: PositiveInt = 8
    """Prompts in each step."""
    num_generations: Annotated[int, Field(ge=2)] = 8
    """Responses to each prompt: the size of a group."""
    max_prompt_length: PositiveInt = 512
    """Longest prompt in tokens, chat template included."""
    max_completion_length: PositiveInt = 256
    """Longest response in tokens."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature; the trainer's log-probs are of the same distribution."""
    mismatch_threshold: Annotated[float, Field(ge=1)] | None = 1.05
    """Warn when a step's `token_mult_prob_error` is above this; empty never warns. 1.05 is the gate of NeMo-RL's functional tests in
    bf16; in fp32 the two sides agree to 1.001."""
    servers: PositiveInt = 1
    """vLLM servers to start, each with `tp` devices."""
    tp: PositiveInt = 1
    """Tensor-parallel size of each vLLM server."""
    urls: list[str] = []
    """Servers that somebody else started (on this host, with the same plug-in); none is launched when given."""
    port: NonNegativeInt = 0
    """Port of the first launched server (the next ones follow); 0 picks free ones."""
    gpu_memory_utilization: Fraction = 0.4
    """Share of each GPU's memory that vLLM may take."""
    kv_cache_gb: PositiveFloat = 2.0
    """Memory of vLLM's KV cache on a machine without a GPU, in GiB."""
    max_num_seqs: PositiveInt = 256
    """Sequences that one server decodes at once."""
    enforce_eager: bool = False
    """Turn CUDA graphs and compilation of vLLM off."""
    extra_args: list[str] = []
    """More arguments for the vLLM API server, as on its command line."""
    startup_timeout: PositiveFloat = 600.0
    """Seconds until a launched server must answer."""
    request_timeout: PositiveFloat = 1800.0
    """Seconds until one generate or sync request must be answered."""

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus longest response, in tokens."""
        return self.max_prompt_length + self.max_completion_length


class DatasetSection(Section):
    source: str
    """A jsonl, parquet or csv file, a folder, a hub name, or `reasoning_gym:FAMILY`."""
    split: str = "train"
    """Split of a hub data set or a folder; slices such as `train[:100]` work."""
    subset: str | None = None
    """Configuration name of a hub data set (gsm8k: `main`)."""
    size: PositiveInt | None = None
    """Rows to generate (reasoning-gym) or to keep."""
    options: dict[str, Any] = {}
    """Options of a reasoning-gym family, `seed` included."""


class DataSection(Section):
    train: DatasetSection
    """Prompts to learn from."""
    eval: DatasetSection | None = None
    """Held-out prompts; no evaluation when empty."""
    prompt_column: str = "prompt"
    """Column with the question: a string or a list of chat messages."""
    columns: dict[str, str] = {}
    """Renames columns for the reward functions: `{solution: answer}` passes column `answer` as `solution`."""
    system_prompt: str | None = None
    """System message put before string prompts."""
    chat_template: str | None = None
    """Jinja text, or a file holding it, used in place of the tokenizer's; `none` feeds the prompt as plain text."""
    shuffle: bool = True
    """Shuffle each epoch in an order that depends only on the seed and the epoch."""
    overlong_prompts: Literal["error", "drop", "truncate_left"] = "drop"
    """What happens to prompts above `rollout.max_prompt_length`."""


class RewardFunction(Section):
    function: str
    """`exact_number`, `accuracy`, `format`, `soft_overlong`, `reasoning_gym`, or your own as `package.module:function` or
    `path/file.py:function`."""
    weight: float = 1.0
    """Weight in the sum of rewards."""
    args: dict[str, Any] = {}
    """Keyword arguments passed on every call."""


class RewardsSection(Section):
    functions: Annotated[list[RewardFunction], Field(min_length=1)]
    """Reward functions; the weighted sum is the reward."""
    timeout: PositiveFloat = 10.0
    """Seconds one completion may take to score; then its worker is killed, the completion gets 0 and is counted in the metrics."""
    workers: PositiveInt = 2
    """Worker processes per rank that scores."""


class TrainSection(Section):
    learning_rate: PositiveFloat = 1e-6
    """Peak learning rate of AdamW."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after warm-up, down to `min_learning_rate` at `run.max_steps`."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps of linear warm-up."""
    min_learning_rate: NonNegativeFloat = 0.0
    """Where linear and cosine end."""
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """AdamW beta 1."""
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """AdamW beta 2."""
    adam_epsilon: PositiveFloat = 1e-8
    """AdamW epsilon."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay (not on norms and biases)."""
    max_grad_norm: NonNegativeFloat = 1.0
    """Clip the global gradient norm to this; 0 does not clip."""
    max_skipped_steps: PositiveInt = 5
    """Stop after so many optimizer steps in a row whose loss or gradient was NaN or infinite. Each is skipped: it changes no weight."""
    max_tokens_per_micro_batch: PositiveInt = 4096
    """Token budget of one packed micro-batch; the longest sample must fit."""
    share_prompts: bool | None = None
    """Compute a prompt once for all its responses in a micro-batch: the same gradient from fewer tokens. Empty: wherever the attention can
    (it cannot with Transformer Engine)."""
    logprob_chunk: PositiveInt = 256
    """Tokens whose logits exist at once in the LM head. Each chunk adds to the gradient of the whole head: on GPUs, where that is memory
    traffic beside little arithmetic, a larger one is faster."""
    distributed_optimizer: bool = True
    """Shard optimizer state and master weights over the data-parallel ranks."""


class EvaluationSection(Section):
    steps: NonNegativeInt = 0
    """Evaluate every so many steps; with `data.eval` it also runs before the first and after the last step."""
    temperature: NonNegativeFloat = 0.0
    """Sampling temperature of evaluation; 0 is greedy."""
    num_generations: PositiveInt = 1
    """Responses per held-out prompt."""


class DebugSection(Section):
    dump_steps: list[PositiveInt] = []
    """Steps to write to `dumps/` of the run, weights included, for `megagrpo audit`. The run itself stays the same."""


class RunConfig(Section):
    """Everything a run needs. `defaults:` in a YAML names the file it starts from."""

    run: RunSection = RunSection()
    model: ModelSection
    parallel: ParallelSection = ParallelSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    rollout: RolloutSection = RolloutSection()
    data: DataSection
    rewards: RewardsSection
    train: TrainSection = TrainSection()
    evaluation: EvaluationSection = EvaluationSection()
    debug: DebugSection = DebugSection()

    @model_validator(mode="after")
    def _sections_agree(self) -> RunConfig:
        problems = cross_field_problems(self)
        if problems:
            raise ValueError("\n".join(problems))
        return self


def cross_field_problems(config: RunConfig) -> list[str]:
    """Rules that span fields, as `key: what is wrong; what to do`. Pure function of a config whose fields are each valid."""
    p, t, r, a = config.parallel, config.train, config.rollout, config.algorithm
    problems = []
    if a.full_kl and a.use_bias_correction_kl:
        problems.append(
            f"algorithm.use_bias_correction_kl: {a.kl_estimator} is exact and takes no correction; set it to false or choose k1 or k3"
        )
    if p.sequence_parallel and p.tp == 1:
        problems.append("parallel.sequence_parallel: needs parallel.tp > 1; set it to false or raise tp")
    if p.vpp > 1 and p.pp == 1:
        problems.append(f"parallel.vpp: {p.vpp} needs parallel.pp > 1; set vpp to 1 or raise pp")
    if p.pipeline_layers is not None and len(p.pipeline_layers) != p.pp * p.vpp:
        problems.append(
            f"parallel.pipeline_layers: {p.pipeline_layers} gives {len(p.pipeline_layers)} stage(s), pp {p.pp} x vpp {p.vpp} make "
            f"{p.pp * p.vpp}; give one number of layers per stage"
        )
    if r.max_model_len > t.max_tokens_per_micro_batch:
        problems.append(
            f"train.max_tokens_per_micro_batch: {t.max_tokens_per_micro_batch} cannot hold the longest sample, "
            f"rollout.max_prompt_length {r.max_prompt_length} + max_completion_length {r.max_completion_length} = {r.max_model_len}"
        )
    optimizer_steps = config.run.max_steps * config.algorithm.num_iterations
    if t.warmup_steps > optimizer_steps:
        problems.append(f"train.warmup_steps: {t.warmup_steps} is more than the run's {optimizer_steps} optimizer steps")
    if t.min_learning_rate > t.learning_rate:
        problems.append(f"train.min_learning_rate: {t.min_learning_rate} is above train.learning_rate {t.learning_rate}")
    if late := [step for step in config.debug.dump_steps if step > config.run.max_steps]:
        problems.append(f"debug.dump_steps: step {late[0]} never comes, run.max_steps is {config.run.max_steps}; name an earlier step")
    if config.evaluation.steps and config.data.eval is None:
        problems.append("evaluation.steps: needs data.eval; name held-out prompts or set steps to 0")
    if config.evaluation.num_generations > 1 and config.evaluation.temperature == 0:
        problems.append("evaluation.num_generations: greedy responses are all the same; raise evaluation.temperature or use 1")
    return problems


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The config in the YAML file `path` with `key=value` overrides applied. ConfigError lists every problem at once."""
    return config_io.load(RunConfig, path, overrides, cross_field_problems)


def render_help() -> str:
    """Every key with its type, default and meaning."""
    return config_io.render_help(RunConfig)


def save_resolved(config: RunConfig, folder: str | Path) -> Path:
    """Writes `resolved.yaml`, which loads back to an equal config, into `folder`; its path."""
    path = Path(folder) / "resolved.yaml"
    config_io.save(config, path)
    return path
