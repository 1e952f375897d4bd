"""The device seam: the only package that knows whether there is a GPU. Importing it prepares torch and megatron-core
for this machine.

The `__init__` of every package that imports megatron imports this one first, so modules import in any order.

With a GPU nothing is patched. Without one, `install()` gives megatron-core 0.19 a CPU and gloo platform. megatron-core
hard-codes `torch.cuda...` and `device="cuda"` in about 200 places and offers no switch, so the names it calls are
redirected to the CPU. `torch.cuda.is_available()` stays False, so other libraries keep their own CPU paths. Each patch
says which code needs it and when it can go; all can go when megatron-core has a CPU platform of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import importlib.util
import logging
import os
import queue
import resource
import warnings

import torch

from megagrpo.platform.device import apex, cpu, cpu_patches, wide_products
from megagrpo.platform.device.packaged_cudnn import load_packaged_cudnn
from megagrpo.platform.process.imports import without
from megagrpo.platform.process.variables import ENVIRONMENT, KEPT_BYTES, number

_CPU = torch.device("cpu")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_installed = False


def has_gpu() -> bool:
    """Whether this process computes on a GPU."""
    return torch.cuda.is_available()


def device() -> torch.device:
    """Return the device of this rank's tensors."""
    return torch.device("cuda", torch.cuda.current_device()) if has_gpu() else _CPU


def backend() -> str:
    """Return the torch.distributed backend that moves tensors of `device()`."""
    return "nccl" if has_gpu() else "gloo"


def select_local_device() -> None:
    """Bind this process to the GPU of its `LOCAL_RANK`; a no-op on a CPU."""
    if has_gpu():
        torch.cuda.set_device(number("LOCAL_RANK", 0) % torch.cuda.device_count())


def visible_gpus() -> list[str] | None:
    """Return the ids of this host's GPUs as CUDA_VISIBLE_DEVICES names them; None on a machine without one."""
    if not has_gpu():
        return None
    named = ENVIRONMENT.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count()  # CUDA ignores what follows an entry that names no GPU
    return [name.strip() for name in named.split(",")][:count] if named else [str(i) for i in range(count)]


def name() -> str:
    """Return the name of this process's GPU, or the model of the CPU."""
    if has_gpu():
        return torch.cuda.get_device_name()
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as lines:
        return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "CPU")
    return "CPU"


def gpu_memory_gb() -> float | None:
    """Return the memory of this process's GPU in GiB; None on a machine without one."""
    return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory / 2**30 if has_gpu() else None


PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def resolve_precision(precision: str) -> torch.dtype:
    """Return the compute dtype of `model.precision`; "auto" is bf16 where the hardware multiplies bf16, float32
    elsewhere. Raises ValueError for another name."""
    if precision == "auto":
        precision = "bf16" if _multiplies_bf16() else "fp32"
    if precision not in PRECISIONS:
        raise ValueError(f"precision: {precision!r} is not one of auto, {', '.join(PRECISIONS)}")
    return PRECISIONS[precision]


def engine_precision(trainer: torch.dtype) -> torch.dtype:
    """Return the engine's compute dtype: the trainer's, or float32 on CPUs that emulate bf16 products."""
    return trainer if trainer == torch.float16 or _multiplies_bf16() else torch.float32


def prepare_precision(dtype: torch.dtype) -> None:
    """Make products of 16-bit numbers as fast as the device can, and products of float32 on a GPU exact. Idempotent.

    Call it before the first product: NVIDIA's libraries read NVIDIA_TF32_OVERRIDE when they start. Transformer Engine
    multiplies float32 in TF32, whose 10 bits of mantissa drop most of a small update of a weight. On Hopper it then
    multiplies the tokens of all experts in one kernel, where its default is a kernel for each expert.
    """
    if dtype == torch.bfloat16 and has_gpu():
        ENVIRONMENT.setdefault("NVTE_USE_CUTLASS_GROUPED_GEMM", "1")
    if dtype == torch.float32 and has_gpu():
        ENVIRONMENT.setdefault("NVIDIA_TF32_OVERRIDE", "0")
    if (dtype == torch.bfloat16 and not _multiplies_bf16()) or (dtype == torch.float16 and not _multiplies_fp16()):
        wide_products.install(dtype)


def _multiplies_bf16() -> bool:
    return has_gpu() or cpu.this_cpu().multiplies_bf16


def _multiplies_fp16() -> bool:
    return has_gpu() or cpu.has_fp16()


def add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Compute total += left right: `total` [n, m] in float32, `left` [n, k] and `right` [k, m] in a narrower dtype.

    On a GPU one product does it, without rounding in between. On a CPU blocks of rows are multiplied, rounded and
    added, so that the rounded product stays in the cache.
    """
    if has_gpu():
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
        return
    step = max(1, 4 * block_elements() // total.shape[1])
    for start in range(0, total.shape[0], step):
        rows = slice(start, start + step)
        total[rows] += left[rows] @ right


def write_product(out: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Compute out = left right, `out` [n, m] in float32, `left` [n, k] and `right` [k, m] in a narrower dtype, to which
    the product is rounded first.

    On a CPU blocks of columns are multiplied and converted, so that the rounded product stays in the cache.
    """
    step = out.shape[1] if has_gpu() else max(1, 4 * block_elements() // out.shape[0])
    for start in range(0, out.shape[1], step):
        columns = slice(start, start + step)
        out[:, columns].copy_(left @ right[:, columns])


def memory_gb() -> float:
    """Return the peak memory of this process so far in GiB: GPU memory if there is a GPU, resident memory otherwise."""
    if has_gpu():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts in KiB


def block_elements() -> int:
    """Return the number of float32 elements that elementwise work should process at a time.

    On a CPU they fit into a core's cache; on a GPU they make launching the kernels cheap.
    """
    return 2**24 if has_gpu() else 2**18


def host_memory_gb() -> float:
    """Return the RAM of this host in GiB, or this container's limit if lower."""
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # "max" where there is none
    with contextlib.suppress(OSError, ValueError), open("/sys/fs/cgroup/memory.max") as limit:
        size = min(size, int(limit.read()))
    return size / 2**30


def host_bytes(count: int) -> torch.Tensor:
    """Return uninitialised host memory [count] uint8, pinned if there is a GPU, for device copies at full speed."""
    return torch.empty(count, dtype=torch.uint8, pin_memory=has_gpu())


def release_memory() -> None:
    """Return memory that allocators cache to the device or the system."""
    if has_gpu():
        torch.cuda.empty_cache()
    else:
        ctypes.CDLL(None).malloc_trim(0)


def reuse_freed_memory() -> None:
    """Make this process keep the memory of freed tensors of up to KEPT_BYTES for its next tensors, until
    `release_memory`. No effect with a GPU, whose allocator does so, or without glibc.

    By default glibc returns the end of its heap to the system many times in a backward pass. The system clears each
    page that it hands out again, which takes 8 times as long as writing the page. Larger tensors are still returned
    when they are freed, because glibc before 2.38 does not reuse their place in its heap.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if not has_gpu() and mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, KEPT_BYTES)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def make_deterministic() -> None:
    """Make every later operation give the same bits each time, or raise when it cannot.

    Call it before the first process group and the first product: NCCL, cuBLAS and Transformer Engine read the
    environment when they start. NCCL_ALGO and CUBLAS_WORKSPACE_CONFIG keep a value that the user has set.
    """
    # otherwise NCCL may tune the order of a sum over ranks again in each run
    ENVIRONMENT.setdefault("NCCL_ALGO", "Ring")
    ENVIRONMENT.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    ENVIRONMENT["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"
    torch.use_deterministic_algorithms(True)
    # no code reads memory before writing it
    cpu_patches.replace(torch.utils.deterministic, fill_uninitialized_memory=False)


def is_deterministic() -> bool:
    """Whether `make_deterministic` was called."""
    return torch.are_deterministic_algorithms_enabled()


def has_transformer_engine() -> bool:
    """Whether Transformer Engine can run here: it needs a GPU and the package."""
    return has_gpu() and importlib.util.find_spec("transformer_engine") is not None


@functools.cache
def has_apex() -> bool:
    """Whether NVIDIA's apex can compute here: it has a module amp_C, unlike the package apex on the Python index."""
    if any(importlib.util.find_spec(name) is None for name in ("amp_C", "apex")):
        return False
    return has_gpu() or apex.computes_on_cpu()


def has_packed_attention(sinks: bool) -> bool:
    """Whether cuDNN has fused attention for packed sequences on this GPU: from Hopper on, and with attention sinks from
    9.26 on (older ones read out of bounds for the sinks' gradients: Transformer Engine, issue 3249). True without a
    GPU."""
    fused = not has_gpu() or torch.cuda.get_device_capability() >= (9, 0)
    return fused and not (sinks and has_gpu() and (torch.backends.cudnn.version() or 0) < 92600)


def fp8_problem(recipe: str) -> str | None:
    """Return why GPU or software cannot run `recipe` of `model.fp8_recipe`; None if they can, or without a GPU."""
    if not has_gpu():
        return None
    if not has_transformer_engine():
        return "it needs Transformer Engine, which is not installed"
    from transformer_engine.pytorch import is_fp8_available, is_fp8_block_scaling_available, is_mxfp8_available

    available = {"blockwise": is_fp8_block_scaling_available, "mxfp8": is_mxfp8_available}.get(recipe, is_fp8_available)
    possible, reason = available(return_reason=True)
    return None if possible else reason.rstrip(".")


def no_fused_kernels() -> str | None:
    """Return why our Triton kernels cannot run here; None where they can.

    They run on Hopper GPUs, whose shared memory they are tuned for, or any CPU under Triton's interpreter, for tests.
    """
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if not has_gpu():
        return None if interprets_triton() else "there is no GPU"
    return None if torch.cuda.get_device_capability()[0] == 9 else f"{torch.cuda.get_device_name()} is not a Hopper GPU"


def interprets_triton() -> bool:
    """Whether Triton's kernels run on the CPU, in its interpreter."""
    return not has_gpu() and ENVIRONMENT.get("TRITON_INTERPRET") == "1"


def num_processors() -> int:
    """Return the number of multiprocessors of this rank's GPU; 4 without one, so that work is split on a CPU too."""
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count if has_gpu() else 4


def quiet() -> None:
    """Silence notices of Megatron, and torch's about the collectives that Megatron calls. Users cannot act on them."""
    logging.getLogger("megatron").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message="`torch.distributed.", category=FutureWarning)
    # of a checkpoint; each rank has selected its device
    warnings.filterwarnings("ignore", message=r"barrier\(\): using the device", category=UserWarning)


# Megatron's timers import trackers, which nothing here writes to; with pandas and protobuf they open 1,300 files.
@without("wandb", "torch.utils.tensorboard")
def install() -> None:
    """Prepare torch and megatron-core for this machine. Idempotent; call it before anything imports megatron.core."""
    global _installed
    if _installed:
        return
    _installed = True
    if importlib.util.find_spec("transformer_engine"):  # which megatron-core imports, with a GPU or without
        load_packaged_cudnn(ENVIRONMENT)
    if not has_gpu():
        choose_float32_products()
        cpu_patches.patch_torch()
        cpu_patches.patch_megatron()
    _report_writes_in_process()
    # Megatron takes its Adam from Transformer Engine, then from NVIDIA's apex. Then it falls back to torch.optim.AdamW,
    # which its distributed optimizer cannot checkpoint.
    if not (has_transformer_engine() or has_apex()):
        _use_own_adam()


def _report_writes_in_process() -> None:
    """Make checkpoint writers, which are threads of this process, report through a queue of this process.

    Megatron spawns a manager process per rank for it, which takes five seconds and 700 MB and outlives a killed rank.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    filesystem_async.get_write_results_queue = lambda mp_mode=None: queue.Queue()


def _use_own_adam() -> None:
    """Give megatron-core an Adam whose checkpoint layout is APEX's. Can go when its distributed optimizer loads
    torch.optim.AdamW."""
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    from megagrpo.platform.device.adam import FusedAdam

    optimizer.Adam = distrib_optimizer.Adam = FusedAdam
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_APEX_OPTIMIZER = True


def choose_float32_products() -> None:
    """Make oneDNN multiply float32 matrices where `cpu.this_cpu` says so, and MKL elsewhere.

    torch has two interfaces for this setting and refuses a mix. emerging_optimizers, whose Muon sets and restores it,
    uses this older one, and so does every caller here. "medium" permits bf16 products, but oneDNN computes them on CPUs
    with AMX only.
    """
    torch.set_float32_matmul_precision("medium" if cpu.this_cpu().float32_by_onednn else "highest")


# megatron-core warns of its own internals on import and in every step; users of this package cannot act on the
# warnings.
warnings.filterwarnings("ignore", module=r"megatron\.")
install()
