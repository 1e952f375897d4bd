"""What CUDA kernels compute, computed by the CPU: for a runtime whose device memory the CPU can address (runtime.py).

`Kernels` receives each aten function that has a tensor on `cuda`. It lays CPU tensors over the memory of these tensors,
calls the CPU's kernel, and moves new results into memory of torch's CUDA allocator. Everything above a kernel
(autograd, autocast, modules) and below it (allocator, storages, streams, events, pinned memory) is torch's own code for
CUDA.

Kernels refuse tensors of different devices; `check_devices` does so here. It also counts the functions that make a
GPU's host wait.
"""

from __future__ import annotations

import collections
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from tests.fake_gpu.attention import FUSED

aten = torch.ops.aten
# These launch no kernel: they allocate, or change a tensor's shape, storage or owner.
NO_KERNEL = frozenset(
    "aten::" + name
    for name in (
        "alias as_strided_ detach detach_ empty.memory_format empty_like empty_strided is_pinned is_same_size "
        "lift_fresh new_empty new_empty_strided _pin_memory record_stream _reshape_alias resize_ resize_as_ set_ "
        "set_.source_Storage set_.source_Storage_storage_offset set_.source_Tensor set_data squeeze_ squeeze_.dim t_ "
        "transpose_ unsqueeze_ _unsafe_view"
    ).split()
)
# These copy between devices.
BETWEEN_DEVICES = frozenset(
    "aten::" + name for name in "copy_ copy _to_copy _copy_from _foreach_copy_ _foreach_copy".split()
)
# Beside pointwise functions, these accept a CPU tensor without dimensions; and the second group accepts indices on the
# CPU.
TAKE_SCALARS = frozenset(
    "aten::" + name
    for name in (
        "fill_.Tensor masked_fill.Tensor masked_fill_.Tensor index_put index_put_ _index_put_impl_ where.self "
        "_foreach_mul.Tensor _foreach_mul_.Tensor"
    ).split()
)
TAKE_INDICES = frozenset(
    "aten::" + name for name in "index.Tensor index_put index_put_ _index_put_impl_ _unsafe_index.Tensor".split()
)
PRODUCTS = ("mm", "bmm", "addmm", "baddbmm")
INDEX_TYPES = (torch.int64, torch.int32, torch.bool, torch.uint8)
# The size of their result, or a number of the host, depends on the device.
WAIT = frozenset(
    "aten::" + name
    for name in "_local_scalar_dense nonzero equal masked_select is_nonzero _unique2 unique_dim "
    "unique_consecutive".split()
)


class Kernels(TorchDispatchMode):
    """The CPU's kernels for tensors on `cuda`. `calls` counts functions by name. `waits` counts the functions that make
    the host wait, by name and line of this project; `on_wait`, if set, is called before each. `on_copy`, if set, is
    called with each copy_(target, source, non_blocking) and returns whether it has done the copy itself; `on_use` with
    the tensors of all functions. With `skips_products` matrix products are zeros, for measurements of memory."""

    active: Kernels | None = None  # of this process

    def __init__(self) -> None:
        super().__init__()
        self.calls: collections.Counter[str] = collections.Counter()
        self.waits: collections.Counter[tuple[str, str]] = collections.Counter()
        self.on_copy: Callable[[Tensor, Tensor, bool], bool] | None = None
        self.on_use: Callable[[list[Tensor]], None] | None = None
        self.on_wait: Callable[[], None] | None = None
        self.skips_products = False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Compute one function on the CPU if a tensor or the requested device is on `cuda`."""
        kwargs = dict(kwargs or {})
        if any(kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ for kind in types):
            return NotImplemented  # the subclass dispatches first, then calls this mode again with plain tensors
        leaves, spec = tree_flatten((args, kwargs))
        owners = [leaf for leaf in leaves if on_cuda(leaf)]
        wanted = torch.device(kwargs["device"]) if kwargs.get("device") is not None else None
        if not owners and (wanted is None or wanted.type != "cuda"):
            return func(*args, **kwargs)
        name = func.name()
        if func.namespace == "c10d":  # messages; this code calls functions of aten
            with self:
                return func._op_dk(torch._C.DispatchKey.CUDA, *args, **kwargs)
        if torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"):  # made of other functions
            with self:
                return func.decompose(*args, **kwargs)
        if (
            func.namespace not in ("aten", "prims")
            or func.is_view
            or name in NO_KERNEL
            or (wanted and wanted.type == "meta")
        ):
            return func(*args, **kwargs)
        check_devices(func, name, leaves)
        self._count(name, leaves, kwargs)
        if name == "aten::copy_" and self.on_copy is not None and self.on_copy(args[0], args[1], leaves[-1] is True):
            return args[0]
        if self.on_use is not None:
            self.on_use(owners)
        return self._compute(func, name, (leaves, spec), owners, wanted)

    def _compute(
        self, func: Any, name: str, packed: tuple[list, Any], owners: list[Tensor], wanted: torch.device | None
    ) -> Any:
        leaves, spec = packed
        views = {id(owner): host_view(owner) for owner in owners}
        args, kwargs = tree_unflatten([views.get(id(leaf), leaf) for leaf in leaves], spec)
        home = wanted or owners[0].device
        if home.type == "cuda":
            home = home if home.index is not None else torch.device("cuda", torch.cuda.current_device())
            kwargs.pop("pin_memory", None)
        if wanted is not None:
            kwargs["device"] = torch.device("cpu")
        if home.type == "cuda" and torch.Tag.nondeterministic_seeded in func.tags:
            seed_from(home, func, kwargs)
        results = on_cpu(func, name, args, kwargs)
        for owner in owners:
            follow_size(owner, views[id(owner)])
        originals = {id(views[id(owner)]): owner for owner in owners}
        if home.type != "cuda":  # a copy to the host never shares memory of the device
            return tree_map(lambda x: x.clone() if id(x) in originals else x, results)
        memory = {owner.untyped_storage().data_ptr(): owner for owner in owners if owner.untyped_storage().nbytes()}
        return tree_map(lambda x: to_cuda(x, originals, memory, home) if isinstance(x, Tensor) else x, results)

    def _count(self, name: str, leaves: list, kwargs: dict) -> None:
        self.calls[name] += 1
        waits = name in WAIT
        if name == "aten::repeat_interleave.Tensor":
            waits = kwargs.get("output_size") is None
        elif name in TAKE_INDICES:
            waits = any(on_cuda(leaf) and leaf.dtype in (torch.bool, torch.uint8) for leaf in leaves[1:])
        elif name == "aten::_to_copy":
            waits = on_cuda(leaves[0]) and str(kwargs.get("device")) == "cpu" and not kwargs.get("non_blocking")
        elif name == "aten::copy_":
            waits = leaves[0].device.type != leaves[1].device.type and leaves[-1] is not True
        if waits:
            self.waits[name, project_line()] += 1
            if self.on_wait is not None:
                self.on_wait()


def replace_everywhere() -> Kernels:
    """Compute by `Kernels` in this thread, in autograd's threads, which inherit it, and in all threads that Python
    starts from now on."""
    mode = Kernels.active = Kernels()
    # attention.py has flash; torch's unfused attention is made of aten functions
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    text, begin = torch._tensor_str._str, threading.Thread._bootstrap_inner

    def as_text(tensor: Tensor, **options: Any) -> str:
        """Print a copy: torch switches modes off while it prints."""
        return text(tensor.detach().cpu() if on_cuda(tensor) else tensor, **options)

    def begin_with_kernels(thread: threading.Thread) -> None:
        with mode:
            begin(thread)

    torch._tensor_str._str, threading.Thread._bootstrap_inner = as_text, begin_with_kernels
    mode.__enter__()
    return mode


def on_cuda(thing: Any) -> bool:
    """Whether this is a tensor on a GPU."""
    return isinstance(thing, Tensor) and thing.device.type == "cuda"


def host_view(owner: Tensor) -> Tensor:
    """Return a CPU tensor over the memory of a cuda tensor, of the same shape and strides. It must not outlive
    `owner`."""
    if not owner.numel():
        return torch.empty_strided(owner.size(), owner.stride(), dtype=owner.dtype)
    memory = owner.untyped_storage()
    storage = torch._C._construct_storage_from_data_pointer(memory.data_ptr(), torch.device("cpu"), memory.nbytes())
    view = torch.empty(0, dtype=owner.dtype).set_(storage, owner.storage_offset(), owner.size(), owner.stride())
    view = torch._conj(view) if owner.is_conj() else view
    return torch._neg_view(view) if owner.is_neg() else view


def check_devices(func: Any, name: str, leaves: Sequence[Any]) -> None:
    """Raise RuntimeError, as a kernel does, for tensors of different devices."""
    if name in BETWEEN_DEVICES:
        return
    tensors = [(place, leaf) for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    home = next((leaf.device for _, leaf in tensors if on_cuda(leaf)), None)
    for place, tensor in tensors:
        on_host = tensor.device.type == "cpu" and place > 0
        scalar = on_host and tensor.dim() == 0 and (torch.Tag.pointwise in func.tags or name in TAKE_SCALARS)
        indices = on_host and name in TAKE_INDICES and tensor.dtype in INDEX_TYPES
        if home is not None and tensor.device != home and not scalar and not indices:
            both = f"{home} and {tensor.device}! (argument {place} of {name})"
            raise RuntimeError(f"Expected all tensors to be on the same device, but found at least two devices, {both}")


def seed_from(home: torch.device, func: Any, kwargs: dict) -> None:
    """Give a random function a CPU generator that follows from seed and offset of the device's generator, and advance
    the offset."""
    own = kwargs.get("generator") or torch.cuda.default_generators[home.index]
    if own.device.type != "cuda":
        return
    offset = own.get_offset()
    own.set_offset(offset + 4)
    seed = hash((own.initial_seed(), offset)) % 2**63
    if any(argument.name == "generator" for argument in func._schema.arguments):
        kwargs["generator"] = torch.Generator().manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def on_cpu(func: Any, name: str, args: tuple, kwargs: dict) -> Any:
    """Call the CPU's kernel of a function. A function without one is computed by other functions, with the same
    numbers."""
    if name in FUSED:
        return FUSED[name](*args, **kwargs)
    base, _, overload = name.removeprefix("aten::").partition(".")
    if base in PRODUCTS and Kernels.active is not None and Kernels.active.skips_products:
        return zeros(func, args, kwargs)
    if base in PRODUCTS and overload.startswith("dtype"):
        return wide_product(base, args, kwargs)
    if base in ("_softmax", "_log_softmax") and args[2]:  # bf16 to float32 within one kernel
        return func(args[0].float(), args[1], False)
    try:
        return func(*args, **kwargs)
    except NotImplementedError:
        if func not in decomposition_table:
            raise
        return decomposition_table[func](*args, **kwargs)


def zeros(func: Any, args: tuple, kwargs: dict) -> Tensor:
    """A result of a function's shape and dtype, without its numbers."""
    if "out" in kwargs:
        return kwargs["out"].zero_()
    shapes = tree_map(lambda x: x.to("meta") if isinstance(x, Tensor) else x, (args, kwargs))
    return torch.zeros_like(func(*shapes[0], **shapes[1]), device="cpu")


def wide_product(base: str, args: tuple, kwargs: dict) -> Tensor:
    """A product of narrow factors summed in `out_dtype`, without rounding in between: [b,] n x k times k x m, plus a
    total if any."""
    tensors, wide = list(args), kwargs.get("out_dtype")
    if wide is None:
        wide = next(arg for arg in args if isinstance(arg, torch.dtype))
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
    *total, left, right = (tensor.to(wide) for tensor in tensors)
    product = left @ right * kwargs.get("alpha", 1)
    if total:
        product += total[0] * kwargs.get("beta", 1)
    return kwargs["out"].copy_(product) if "out" in kwargs else product


def follow_size(owner: Tensor, view: Tensor) -> None:
    """If the CPU's kernel has enlarged an output, enlarge the cuda tensor, and copy the contents."""
    if view.size() != owner.size() or (view.numel() and view.data_ptr() != owner.data_ptr()):
        owner.resize_(view.size())
        host_view(owner).copy_(view)


def to_cuda(result: Tensor, originals: dict[int, Tensor], memory: dict[int, Tensor], home: torch.device) -> Tensor:
    """Return a CPU result as a cuda tensor: an argument itself, a view of an argument, or new memory of the CUDA
    allocator."""
    if id(result) in originals:
        return originals[id(result)]
    if result.numel() and (owner := memory.get(result.untyped_storage().data_ptr())) is not None:
        return owner.as_strided(result.size(), result.stride(), result.storage_offset())
    made = torch.empty_strided(result.size(), result.stride(), dtype=result.dtype, device=home)
    if result.numel():
        host_view(made).copy_(result)
    return made


def project_line() -> str:
    """Return the innermost line of this project on the stack, as file:line, or an empty string."""
    for frame, line in traceback.walk_stack(None):
        path = frame.f_code.co_filename
        if "/megagrpo/" in path and "/tests/" not in path:
            return f"{path.rpartition('/megagrpo/')[2]}:{line}"
    return ""
