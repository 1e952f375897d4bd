"""DDP, the (distributed) AdamW with float32 master weights, and the learning-rate schedule, all Megatron-Core's own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

import megagrpo.parallel.device  # noqa: F401  (prepares the platform before megatron is imported)
from megagrpo.config import TrainSection

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # isort: skip
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer  # isort: skip
from megatron.core.optimizer.param_layout import FullParamLayout  # isort: skip
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer  # isort: skip
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler  # isort: skip


def wrap_data_parallel(chunks: Sequence[torch.nn.Module], train: TrainSection, dp_cp_size: int) -> list[DistributedDataParallel]:
    """Each model chunk with float32 gradient buffers that are summed over the `dp_cp_size` data- and context-parallel
    ranks, which hold the same weights."""
    config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=train.distributed_optimizer)
    layouts = [_buffer_layout(chunk, config, dp_cp_size) for chunk in chunks]
    return [
        DistributedDataParallel(chunk.config, config, chunk, disable_bucketing=index > 0, full_param_layout=layout)
        for index, (chunk, layout) in enumerate(zip(chunks, layouts, strict=True))
    ]


def _buffer_layout(chunk: torch.nn.Module, config: DistributedDataParallelConfig, dp_cp_size: int) -> FullParamLayout | None:
    """Where each parameter lies in the gradient buffers, with the padding between buckets counted as content.

    megatron-core 0.19 joins the buckets without their padding when it saves the optimizer's state, and then cuts it at offsets that
    include the padding. With tied embeddings on two pipeline stages, which have a bucket of their own, a checkpoint then holds shifted
    master weights. Can go when `sharded_param_state_fully_reshardable` cuts where it joined.
    """
    if not config.use_distributed_optimizer:
        return None
    parameters = [p for p in chunk.parameters() if p.requires_grad]
    copies_of_experts = chunk.pg_collection.expt_dp.size()
    layout = DistributedOptimizer.compute_full_param_layout(parameters, None, dp_cp_size, config, copies_of_experts)
    for buffer in layout.layouts.values():
        buffer.per_bucket_numel_unpadded[:-1] = [stop - start for start, stop in buffer.bucket_indices[:-1]]
    return layout


def build_optimizer(wrapped: Sequence[DistributedDataParallel], train: TrainSection, dtype: torch.dtype) -> MegatronOptimizer:
    """AdamW over all chunks; bfloat16 weights get float32 masters. Norms and biases are not decayed."""
    config = OptimizerConfig(
        optimizer="adam",
        lr=train.learning_rate,
        min_lr=train.min_learning_rate,
        weight_decay=train.weight_decay,
        adam_beta1=train.adam_beta1,
        adam_beta2=train.adam_beta2,
        adam_eps=train.adam_epsilon,
        clip_grad=train.max_grad_norm,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=train.distributed_optimizer,
    )
    return get_megatron_optimizer(config, list(wrapped))


def build_scheduler(optimizer: MegatronOptimizer, train: TrainSection, total_steps: int) -> OptimizerParamScheduler:
    """Linear warm-up to `learning_rate` in `warmup_steps`, then constant, linear or cosine to `min_learning_rate` at `total_steps`.

    Advance it before each optimizer step: step k of the warm-up uses k / warmup_steps of the rate, so the first step moves too.
    """
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=train.learning_rate,
        min_lr=train.min_learning_rate,
        lr_warmup_steps=train.warmup_steps,
        lr_decay_steps=max(total_steps, train.warmup_steps + 1),
        lr_decay_style=train.lr_scheduler_type,
        start_wd=train.weight_decay,
        end_wd=train.weight_decay,
        wd_incr_steps=total_steps,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,  # a resumed run follows its configuration, also when max_steps grew
    )


@torch.no_grad()
def gather_gradients(wrapped: Sequence[DistributedDataParallel]) -> None:
    """Whole gradients on every data-parallel rank. The distributed optimizer leaves each rank its own part of the sum, and in the other
    parts of its buffers what it had before; the optimizer's own step is not touched. Collective."""
    for chunk in wrapped:
        for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
            if not group.ddp_config.use_distributed_optimizer:
                continue
            ranks = group.intra_distributed_optimizer_instance_group
            for bucket in group.buckets:
                own = bucket.grad_data.chunk(ranks.size())[ranks.rank()].clone()
                dist.all_gather_into_tensor(bucket.grad_data, own, group=ranks)


def learning_rate(optimizer: MegatronOptimizer) -> float:
    """The rate the last step used."""
    return float(optimizer.param_groups[0]["lr"])
