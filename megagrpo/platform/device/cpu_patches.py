"""Patches of torch and megatron-core for a machine without a GPU. Each says which code needs it and when it can go."""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megagrpo.platform.device.norms import multi_tensor_l2norm

_CPU = torch.device("cpu")


class _Stream:
    """Stand-in for a CUDA stream and event: a CPU runs in order and is always done."""

    def __init__(self, *_: object, **__: object):
        pass

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: _Stream) -> float:
        return 0.0

    def record_event(self, event: _Stream | None = None) -> _Stream:
        return event or _Stream()

    def _nothing(self, *_: object, **__: object) -> None:
        return None

    wait_stream = wait_event = record = wait = synchronize = _nothing


def replace(owner: object, **attributes: object) -> None:
    """Replace attributes of a module or class. A replacement has the original's signature and fewer guarantees."""
    for name, value in attributes.items():
        setattr(owner, name, value)


def _on_cpu[**P, T](factory: Callable[P, T]) -> Callable[P, T]:
    """Wrap `factory`: device="cuda" means the CPU, and pin_memory, which needs a driver, is dropped."""

    @functools.wraps(factory)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        if kwargs:
            if str(kwargs.get("device", "")).startswith("cuda"):
                kwargs["device"] = _CPU
            kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return wrapped


def patch_torch() -> None:
    """Patch names of torch that megatron-core calls without asking whether there is a GPU."""
    cuda = torch.cuda
    # Every layer writes device=torch.cuda.current_device().
    replace(cuda, current_device=lambda: _CPU)
    # DDP buckets, pipeline schedules, checkpoint writer.
    replace(cuda, Stream=_Stream, Event=_Stream, stream=lambda stream=None: contextlib.nullcontext())
    replace(cuda, **dict.fromkeys(("current_stream", "default_stream"), lambda *_, **__: _Stream()))
    # Combined 1F1B schedule.
    replace(torch.Tensor, record_stream=lambda self, stream: None)
    # Pipeline point-to-point messages, checkpoint writer.
    replace(cuda, synchronize=lambda *_, **__: None)
    # RNG trackers. torch would queue these calls until a GPU appears, so seeds would silently have no effect.
    replace(cuda, manual_seed=torch.default_generator.manual_seed)
    for module in (cuda, cuda.random):
        replace(module, get_rng_state=lambda *_, **__: torch.get_rng_state())
        replace(module, set_rng_state=lambda state, *_, **__: torch.set_rng_state(state))
    # `with torch.device(...)` knows constructors by identity, from a list made at its first use: make it before they
    # are wrapped.
    with torch.device("cpu"):
        torch.empty(0)
    # Literal device="cuda" in the optimizer, gradient clipping and schedules; pin_memory=True in the checkpoint writer.
    for name in ("tensor", "zeros", "ones", "empty", "empty_like"):
        replace(torch, **{name: _on_cpu(getattr(torch, name))})
    # tensor_parallel/data.py, tied embeddings, checkpoint exchange.
    replace(torch.Tensor, cuda=lambda self, *_, **__: self, type=_megatron_sees_cuda_types(torch.Tensor.type))


def _megatron_sees_cuda_types(tensor_type: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Tensor.type() for megatron.core, whose optimizers sort parameters by the string "torch.cuda.FloatTensor"."""
    names = {torch.float32: "torch.cuda.FloatTensor", torch.bfloat16: "torch.cuda.BFloat16Tensor"}
    names[torch.float16] = "torch.cuda.HalfTensor"

    def wrapped(
        self: torch.Tensor, dtype: torch.dtype | str | None = None, *args: Any, **kwargs: Any
    ) -> str | torch.Tensor:
        if dtype is not None:
            return tensor_type(self, dtype, *args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        return names.get(self.dtype, tensor_type(self)) if caller.startswith("megatron.core") else tensor_type(self)

    return wrapped


def patch_megatron() -> None:
    """Patch functions of megatron-core that cannot be reached through torch."""
    # Megatron decorates small functions with torch.compile on import; on a CPU that costs seconds and gains nothing.
    compile_function = torch.compile
    replace(torch, compile=lambda function=None, *_, **__: function or (lambda inner: inner))
    try:
        _import_quietly()
        from megatron.core.distributed import param_and_grad_buffer
        from megatron.core.optimizer import clip_grads
        from megatron.core.tensor_parallel import mappings, random
        from megatron.core.transformer.moe import moe_utils, token_dispatcher
        from megatron.core.utils import local_multi_tensor_applier
    finally:
        replace(torch, compile=compile_function)
    # Megatron's version indexes torch.cuda.default_generators in a queued call, which never runs on a CPU: recomputed
    # dropout would differ.
    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    # Megatron warns that the CPU's generator changed while the GPU's was forked; here they are the same generator.
    logging.getLogger(random.__name__).addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())
    # Megatron recommends a package that does not install on every CPU machine.
    logging.getLogger("megatron.core.dist_checkpointing.strategies.torch").addFilter(
        lambda record: "NVRx" not in record.getMessage()
    )
    # Megatron falls back to torch.norm, which is too small on a CPU (see norms.py): the clipped gradient would be too
    # long by as much.
    clip_grads.l2_norm_impl = multi_tensor_l2norm
    # Megatron falls back to a function that allocates a copy of each gradient.
    clip_grads.multi_tensor_scale_impl = _scale
    # Where Transformer Engine is installed, Megatron takes its kernels, which need a GPU, for these and for routers.
    clip_grads.multi_tensor_applier = local_multi_tensor_applier
    clip_grads.multi_tensor_scale_tensor_impl = None
    moe_utils.te_general_gemm = None
    # gloo concatenates tensors that are gathered together, and converts the bytes of FP8 weights to numbers if others
    # are bf16.
    param_and_grad_buffer.dist_all_gather_func = _gather_alone
    # all_to_all_single needs a sequence of numbers; Megatron converts only tensors that it moves away from a GPU.
    moe_utils.maybe_move_tensor_to_cpu = token_dispatcher.maybe_move_tensor_to_cpu = _as_numpy_where_asked
    # gloo gathers tensors of equal length only, but the ranks that share an expert send it different lengths. Can go
    # with a gloo that gathers ragged tensors.
    mappings._gather_along_first_dim = functools.partial(_gather_ragged, mappings._gather_along_first_dim)


def _scale(chunk_size: int, noop: torch.Tensor, tensor_lists: list[list[torch.Tensor]], factor: float) -> None:
    """Write the first list's tensors times `factor` to the second's, called like APEX's multi_tensor_scale."""
    for source, target in zip(*tensor_lists, strict=True):
        torch.mul(source, factor, out=target)


def _gather_alone(whole: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup, async_op: bool) -> None:
    """Gather now, even where torch would wait to combine several gathers or to overlap them (`async_op`)."""
    group._allgather_base(whole, part).wait()


def _as_numpy_where_asked(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _gather_ragged(
    gather: Callable[..., torch.Tensor],
    tensor: torch.Tensor,
    group: dist.ProcessGroup,
    output_split_sizes: Sequence[int] | None = None,
    use_global_buffer: bool = False,
) -> torch.Tensor:
    """Megatron's gather along the first dimension: every rank pads to the longest part, and the padding is cut out."""
    if group.size() == 1 or output_split_sizes is None:
        return gather(tensor, group, None, use_global_buffer)
    longest = max(output_split_sizes)
    padded = tensor.new_zeros(longest, *tensor.shape[1:])
    padded[: len(tensor)] = tensor
    parts = gather(padded, group).split(longest) if longest else [tensor] * group.size()
    return torch.cat([part[:size] for part, size in zip(parts, output_split_sizes, strict=True)])


def _import_quietly() -> None:
    """Import the modules that every run needs, without the advice from a dozen modules to install GPU packages."""
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        importlib.import_module("megatron.core.optimizer")
        importlib.import_module("megatron.core.models.hybrid.hybrid_model")
        importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
