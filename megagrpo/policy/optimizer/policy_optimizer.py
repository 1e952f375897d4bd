"""DDP, (distributed) AdamW with float32 master weights, and the learning-rate schedule. All are Megatron-Core's."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import optimizer
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.param_layout import FullParamLayout
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

import megagrpo.platform.device as device
from megagrpo.config import TrainSection
from megagrpo.platform.device.compact_adam import MOMENTS, CompactAdam
from megagrpo.platform.parallel.layout import Layout
from megagrpo.platform.process.variables import KEPT_BYTES
from megagrpo.policy.fp8.masters import unrounded_values
from megagrpo.policy.layers.megatron_modules import config_of
from megagrpo.policy.optimizer.own_optimizer import OwnSchedule, create_state, own_optimizer

# Scale of Muon's updates that makes their root mean square about equal to AdamW's (Moonlight, arXiv 2502.16982).
MUON_SCALE = 0.2
MOMENT_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


def overlaps_reduction(train: TrainSection, copies: int) -> bool:
    """Whether gradients are reduced over their `copies` data- and context-parallel ranks during the backward pass."""
    wanted = device.has_gpu() if train.overlap_grad_reduce is None else train.overlap_grad_reduce
    return wanted and copies > 1


def wrap_data_parallel(
    chunks: Sequence[torch.nn.Module], train: TrainSection, layout: Layout, in_fp8: bool = False
) -> list[DistributedDataParallel]:
    """Wrap each model chunk with float32 gradient buffers, which are reduced over the data- and context-parallel ranks.

    These ranks hold equal weights. `in_fp8`: some are FP8. `overlaps_reduction`: reduce during the last backward pass.
    """
    copies, wrapped = layout.dp_cp_size, []
    overlaps = overlaps_reduction(train, copies)
    size = train.ddp_bucket_size or max(40_000_000, 1_000_000 * copies)
    for index, chunk in enumerate(chunks):
        config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=train.distributed_optimizer,
            overlap_grad_reduce=overlaps,
            overlap_param_gather="param_gather" in train.overlap,
            delay_wgrad_compute="weight_gradients" in train.overlap,
            bucket_size=size if overlaps else None,
            fp8_param_gather=in_fp8,
        )
        one_bucket = index > 0 or layout.pp_rank > 0 or not overlaps
        buffer_layout = _buffer_layout(chunk, config, None if one_bucket else size, copies)
        wrapped.append(
            DistributedDataParallel(
                chunk.config, config, chunk, disable_bucketing=index > 0, full_param_layout=buffer_layout
            )
        )
    if not overlaps and not device.has_gpu():
        for parameter in (
            p
            for chunk in chunks
            for p in chunk.parameters()
            if p.requires_grad and p.dtype in (torch.bfloat16, torch.float16)
        ):
            if 4 * parameter.numel() > KEPT_BYTES:  # new memory for the converted gradient costs more than the sum
                parameter.register_post_accumulate_grad_hook(_add_by_blocks)
    for chunk in chunks:  # Megatron's schedule runs all micro-batches but the last inside no_sync, without a reduction
        config_of(chunk).no_sync_func = wrapped[0].no_sync if len(wrapped) == 1 else [each.no_sync for each in wrapped]
    return wrapped


def _add_by_blocks(parameter: torch.Tensor) -> None:
    """Add the gradient to the float32 `main_grad` and drop it before Megatron's hook converts all of it to float32."""
    if parameter.grad is None:  # the layer has added it itself
        return
    gradient, total, step = parameter.grad.reshape(-1), cast(Any, parameter).main_grad.view(-1), device.block_elements()
    for start in range(0, gradient.numel(), step):
        total[start : start + step] += gradient[start : start + step]
    parameter.grad = None


def _buffer_layout(
    chunk: torch.nn.Module, config: DistributedDataParallelConfig, bucket_size: int | None, dp_cp_size: int
) -> FullParamLayout | None:
    """Return each parameter's position in the gradient buffers, with the padding between buckets counted as content.

    When megatron-core 0.19 saves optimizer state, it concatenates buckets without padding but slices at offsets with
    padding. Tied embeddings on two pipeline stages have their own bucket, so a checkpoint then holds shifted master
    weights. Can go when `sharded_param_state_fully_reshardable` uses the same offsets for both.
    """
    if not config.use_distributed_optimizer:
        return None
    parameters = [p for p in chunk.parameters() if p.requires_grad]
    groups: Any = chunk.pg_collection
    layout = DistributedOptimizer.compute_full_param_layout(
        parameters, bucket_size, dp_cp_size, config, groups.expt_dp.size()
    )
    for buffer in layout.layouts.values():
        buffer.per_bucket_numel_unpadded[:-1] = [stop - start for start, stop in buffer.bucket_indices[:-1]]
    return layout


def build_optimizer(
    wrapped: Sequence[DistributedDataParallel], train: TrainSection, dtype: torch.dtype
) -> MegatronOptimizer:
    """Build AdamW, Muon with AdamW, or the user's optimizer. 16-bit weights get float32 masters. Norms and biases
    have no weight decay.

    Raises ValueError when moments should be offloaded but there is no GPU, when the package with Muon is missing, or
    when the user's optimizer does not work.
    """
    if train.optimizer == "muon" and importlib.util.find_spec("emerging_optimizers") is None:
        raise ValueError(
            "train.optimizer: muon needs a package that is not installed; pip install emerging-optimizers, or choose "
            "adam"
        )
    if train.optimizer_offload and not device.has_gpu():
        raise ValueError("train.optimizer_offload: true needs a GPU, and this machine has none; set it to false")
    config = OptimizerConfig(
        optimizer="adam" if train.own_optimizer else train.optimizer,
        lr=train.learning_rate,
        min_lr=train.min_learning_rate,
        weight_decay=train.weight_decay,
        adam_beta1=train.adam_beta1,
        adam_beta2=train.adam_beta2,
        adam_eps=train.adam_epsilon,
        clip_grad=train.max_grad_norm,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        loss_scale=1.0 if dtype == torch.float16 else None,  # `LossScale` scales and divides
        params_dtype=dtype,
        use_distributed_optimizer=train.distributed_optimizer,
        overlap_param_gather="param_gather" in train.overlap,
        muon_momentum=train.muon_momentum,
        muon_nesterov=True,
        muon_extra_scale_factor=MUON_SCALE,
        muon_tp_mode="duplicated",  # every rank orthogonalises whole matrices, so the step is the same in every layout
        muon_fp32_matmul_prec="highest" if dtype == torch.float32 else "medium",
    )
    with _adam(train):
        built: Any = get_megatron_optimizer(config, list(wrapped))
    if len(parts := parts_of(built)) > 1:
        # Where only experts are trained, every rank's optimizer of all else is empty, and megatron-core 0.19 fails to
        # save it.
        built.chained_optimizers = [part for part in parts if not part.is_stub_optimizer]
    for part in parts_of(built) if train.own_optimizer else ():
        part.init_state_fn = create_state
    return cast(MegatronOptimizer, built)


@contextlib.contextmanager
def _adam(train: TrainSection) -> Iterator[None]:
    """Context manager: Megatron builds the user's optimizer, or CompactAdam if `train` asks for compact or offloaded
    moments, in place of its Adam."""
    stock = optimizer.Adam
    if train.own_optimizer:
        optimizer.Adam = own_optimizer(train)
    elif train.optimizer_state_dtype != "fp32" or train.optimizer_offload:
        optimizer.Adam = partial(
            CompactAdam, dtype=MOMENT_DTYPES[train.optimizer_state_dtype], offload=train.optimizer_offload
        )
    try:
        yield
    finally:
        optimizer.Adam = stock


@contextlib.contextmanager
def dense_moments(built: MegatronOptimizer) -> Iterator[None]:
    """Context manager: inside it moments are float32 tensors in the optimizer's state, the form that Megatron's
    checkpoints read and write."""
    compact = [part.optimizer for part in parts_of(built) if isinstance(part.optimizer, CompactAdam)]
    for part in compact:
        part.dense_moments()
    try:
        yield
    finally:
        for part in compact:
            part.compact_moments()


def parts_of(built: MegatronOptimizer) -> list[MegatronOptimizer]:
    """Return the optimizers inside `built`, one for each group of ranks that shards a state."""
    return getattr(built, "chained_optimizers", [built])


def apex_note(built: MegatronOptimizer) -> str | None:
    """Return a line with the classes of NVIDIA's apex that a run with this optimizer uses; None without apex."""
    if not device.has_apex():
        return None
    classes = {type(part.optimizer) for part in parts_of(built)}
    names = sorted(each.__name__ for each in classes if each.__module__.startswith("apex."))
    names += [] if device.has_transformer_engine() else ["FusedRMSNorm"]
    return f"NVIDIA's apex: {', '.join(names) or 'not used'}"


def held_by(
    built: MegatronOptimizer, parameter: torch.Tensor
) -> Iterator[tuple[torch.optim.Optimizer, int, torch.Tensor]]:
    """Yield (Adam optimizer, start, main) for each optimizer of this rank that holds a part of `parameter`.

    `main` [n] is the tensor that Adam updates: elements [start, start + n) of the flattened parameter.
    """
    for part in parts_of(built):
        if isinstance(part, DistributedOptimizer):
            if parameter in part.model_param_group_index_map:
                group, order = part.model_param_group_index_map[parameter]
                start = part._get_model_param_range_map(parameter)["param"].start
                yield part.optimizer, start, part.optimizer.param_groups[group]["params"][order]
        elif part.optimizer is not None:
            main = getattr(parameter, "main_param", parameter)
            if any(main is other for group in part.optimizer.param_groups for other in group["params"]):
                yield part.optimizer, 0, main


def moments_of(adam: torch.optim.Optimizer, main: torch.Tensor) -> list[torch.Tensor]:
    """Return Adam's two moments [n] of `main` [n], float32; zeros before the first step."""
    if main not in adam.state or "exp_avg" not in adam.state[main]:
        return [torch.zeros_like(main, dtype=torch.float32)] * 2
    if isinstance(adam, CompactAdam):
        return [adam.dense_moment(main, name) for name in MOMENTS]
    return [adam.state[main][name] for name in MOMENTS]


@torch.no_grad()
def masters_from_weights(built: MegatronOptimizer, in_fp8: bool) -> None:
    """Copy the model's weights to the float32 masters; for FP8 weights, the values last written, before rounding."""
    built.reload_model_params()
    for part in parts_of(built) if in_fp8 else []:
        for weights, masters in zip(part.model_float16_groups, part.shard_fp32_from_float16_groups, strict=True):
            for weight, master in zip(weights, masters, strict=True):
                if (values := unrounded_values(weight)) is not None:
                    span = part._get_model_param_range_map(weight)["param"]
                    master.copy_(values.view(-1)[span.start : span.end])


@torch.no_grad()
def weights_from_masters(built: MegatronOptimizer, wrapped: Sequence[DistributedDataParallel]) -> None:
    """Round the model's bf16 and FP8 weights from their masters, as at the end of an optimizer step. Collective."""
    for part in parts_of(built):
        part._copy_main_params_to_model_params()
    for chunk in wrapped:
        if chunk.ddp_config.use_distributed_optimizer:
            chunk.start_param_sync(force_sync=True)


@torch.no_grad()
def gather_weights(wrapped: Sequence[DistributedDataParallel]) -> None:
    """All-gather the updated weights now, if Megatron left it to the next forward pass (`param_gather`). Collective."""
    for chunk in wrapped:
        if chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)


def build_scheduler(built: MegatronOptimizer, train: TrainSection, total_steps: int) -> OptimizerParamScheduler:
    """Build a linear warm-up to `learning_rate`, then constant, linear or cosine decay to `min_learning_rate`; or the
    user's schedule. Raises ProblemError when that does not work.

    The step after `total_steps` would use the minimum: with minimum 0 the last step still learns, as in transformers.

    Advance it before each optimizer step: step k of a warm-up of n steps uses k / n of the rate, so step 1 moves too.
    """
    kind = partial(OwnSchedule, train, total_steps) if train.own_schedule else OptimizerParamScheduler
    return kind(
        built,
        init_lr=0.0,
        max_lr=train.learning_rate,
        min_lr=train.min_learning_rate,
        lr_warmup_steps=train.warmup(total_steps),
        lr_decay_steps=total_steps + 1,
        lr_decay_style="constant" if train.own_schedule else train.lr_scheduler_type,
        start_wd=train.weight_decay,
        end_wd=train.weight_decay,
        wd_incr_steps=total_steps,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        # a resumed run follows its current configuration, for example a larger max_steps
        override_opt_param_scheduler=True,
    )


@torch.no_grad()
def gather_gradients(wrapped: Sequence[DistributedDataParallel]) -> None:
    """All-gather whole gradients to every data-parallel rank.

    The distributed optimizer leaves each rank its own shard of the sum, and stale values in the rest of its buffers.
    The optimizer's own step is unchanged. Collective.
    """
    for chunk in wrapped:
        for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
            if not group.ddp_config.use_distributed_optimizer:
                continue
            ranks = group.intra_distributed_optimizer_instance_group
            for bucket in group.buckets:
                shard = bucket.grad_data.chunk(ranks.size())[ranks.rank()].clone()
                dist.all_gather_into_tensor(bucket.grad_data, shard, group=ranks)
