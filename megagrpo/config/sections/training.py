"""Defines the section `train`: the optimizer, micro-batches, and memory of the trainer."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Annotated, Any, Literal

from pydantic import Field

from megagrpo.config.sections.section import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    choice_or_user_code,
)

OPTIMIZERS, SCHEDULES = ("adam", "muon"), ("constant", "linear", "cosine")
FUSED_SCRATCH_BYTES = 2**30  # limit on the scratch memory of `train.fused_logprobs`


class TrainSection(Section):
    optimizer: Annotated[str, *choice_or_user_code(OPTIMIZERS)] = "adam"
    """AdamW; or Muon for the blocks' matrices, AdamW for embeddings, LM head, norms and biases; or your subclass of
    torch.optim.Optimizer as `path/file.py:name` or `package.module:name`. docs/optimizers.md."""
    optimizer_args: dict[str, Any] = {}
    """Keyword arguments of your own optimizer, beside `lr` and `weight_decay`."""
    learning_rate: PositiveFloat = 1e-6
    """Peak learning rate of AdamW and Muon, whose updates are scaled to the size of AdamW's."""
    lr_scheduler_type: Annotated[str, *choice_or_user_code(SCHEDULES)] = "constant"
    """Shape of the learning rate after warm-up, down to `min_learning_rate` at `run.max_steps`; or your function
    (step, total_steps, train) -> learning rate, as `path/file.py:name`. docs/optimizers.md."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps of linear warm-up."""
    warmup_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Linear warm-up as a share of the run's optimizer steps, rounded up; not together with `warmup_steps`."""
    min_learning_rate: NonNegativeFloat = 0.0
    """Final learning rate of linear and cosine, reached one step after the last."""
    muon_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Muon's Nesterov momentum."""
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
    """End the run after this many consecutive optimizer steps with NaN or infinite loss or gradient. Such steps are
    skipped: they change no weight."""
    max_tokens_per_micro_batch: PositiveInt = 4096
    """Token budget of one packed micro-batch; the longest sample must fit."""
    share_prompts: bool | None = None
    """Compute a prompt once for all its responses in a micro-batch: the same gradient from fewer tokens. Empty: on,
    except on Transformer Engine with `parallel.cp` above 1 (true then uses our slower attention) or with the fused
    rotation of `model.fusions`."""
    logprob_chunk: PositiveInt = 256
    """Tokens whose logits exist at once in the LM head. Larger chunks are faster on GPUs."""
    fused_logprobs: bool = False
    """Compute the LM head's product and softmax in Triton kernels, with at most 1 GiB of scratch memory, instead of
    with `logprob_chunk`. For Hopper GPUs in bf16; not with top_p, top_k, min_p or a full_ kl_estimator."""
    logprobs_fp8_recipe: Literal["none", "tensorwise", "blockwise"] = "none"
    """Multiply hidden states and LM head in FP8 for log-probs, with one scale per tensor or per block of 128; gradients
    use the unrounded values. Needs `fused_logprobs: true`."""
    optimizer_state_dtype: Literal["fp32", "bf16", "fp8"] = "fp32"
    """Dtype of both AdamW moments between steps: 8, 4 or 2 bytes per weight in all. bf16, fp8: stochastic rounding."""
    optimizer_offload: bool = False
    """Keep the moments in host memory between steps; a step copies them to the GPU one tensor at a time."""
    offload: bool | None = None
    """Free the trainer's GPU memory while servers generate: gradients are freed, the rest is offloaded to host memory.
    Empty: on if servers share the trainer's GPU. Without a GPU true frees no memory."""
    distributed_optimizer: bool = True
    """Shard optimizer state and master weights over the data-parallel ranks."""
    overlap_grad_reduce: bool | None = None
    """Reduce gradients over data-parallel ranks by bucket, during the last micro-batch's backward. Empty: on GPUs."""
    overlap: list[Literal["param_gather", "tp", "experts", "shared_experts", "weight_gradients"]] = []
    """Messages of a train step that run beside computation: docs/overlap.md."""
    freeze_moe_router: bool = False
    """Do not train the routers of a mixture of experts. docs/moe.md."""
    ddp_bucket_size: PositiveInt | None = None
    """Gradients per bucket with `overlap_grad_reduce`, on the first pipeline stage. Empty: 40 million, or one million
    per replica if that is more."""

    @property
    def own_optimizer(self) -> bool:
        """Whether `optimizer` names the user's class."""
        return self.optimizer not in OPTIMIZERS

    @property
    def own_schedule(self) -> bool:
        """Whether `lr_scheduler_type` names the user's function."""
        return self.lr_scheduler_type not in SCHEDULES

    def warmup(self, optimizer_steps: int) -> int:
        """Return the optimizer steps of warm-up in a run of `optimizer_steps`."""
        return self.warmup_steps or math.ceil(Fraction(str(self.warmup_ratio)) * optimizer_steps)
