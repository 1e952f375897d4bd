"""The optimizer and the micro-batches."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megagrpo.config.section import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section

FUSED_SCRATCH_BYTES = 2**30  # what `train.fused_logprobs` takes at most


class TrainSection(Section):
    optimizer: Literal["adam", "muon"] = "adam"
    """AdamW; or Muon for the matrices of the blocks, with AdamW for embeddings, LM head, norms and biases. docs/optimizers.md."""
    learning_rate: PositiveFloat = 1e-6
    """Peak learning rate of AdamW. Muon's updates are scaled to the size of AdamW's, so that one rate serves both."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after warm-up, down to `min_learning_rate` at `run.max_steps`."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps of linear warm-up."""
    min_learning_rate: NonNegativeFloat = 0.0
    """Where linear and cosine end: what a step after the last would have."""
    muon_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Muon's momentum, of Nesterov's kind."""
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
    fused_logprobs: bool = False
    """Let Triton kernels multiply the LM head and take its softmax, with 1 GiB of scratch at most instead of `logprob_chunk`. On Hopper
    GPUs in bf16; not with top_p, top_k, min_p or a full_ kl_estimator. docs/gpu.md says what has been proved of them."""
    logprobs_fp8_recipe: Literal["none", "tensorwise", "blockwise"] = "none"
    """Multiply hidden states and LM head in FP8 for log-probs, with one scale each or one per block of 128; gradients take the unrounded
    ones. Needs `fused_logprobs: true`."""
    optimizer_state_dtype: Literal["fp32", "bf16", "fp8"] = "fp32"
    """What AdamW's two moments are kept in between steps: 8, 4 or 2 bytes per weight. Rounded at random, so that none gets stuck."""
    optimizer_offload: bool = False
    """Keep the moments in the host's memory between steps; a step brings them to the GPU, one tensor after the other."""
    offload: bool | None = None
    """While servers generate, leave nothing of the trainer on its GPU: gradients are freed; weights, masters, moments and the reference
    wait in the host's memory. Empty: where servers share the trainer's GPU. Without a GPU true does the same, and frees nothing."""
    distributed_optimizer: bool = True
    """Shard optimizer state and master weights over the data-parallel ranks."""
    overlap_grad_reduce: bool | None = None
    """Sum gradients over the data-parallel ranks bucket by bucket while the last micro-batch's backward pass goes on. Empty: on GPUs."""
    ddp_bucket_size: PositiveInt | None = None
    """Gradients that make a bucket, with `overlap_grad_reduce`; 40 million, or one million per replica if that is more, when empty. The
    first pipeline stage has buckets; those after it, which are not waited for, sum in one."""
