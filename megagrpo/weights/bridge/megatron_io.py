"""Megatron's distributed checkpoint: the model's sharded state and the position of each parameter's parts in it, the
state of random number generators, and a write that each rank can do in the background."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.api import CheckpointException
from torch.overrides import TorchFunctionMode

from megagrpo.families.hf_config import HfConfig
from megagrpo.families.shared.blocks import Block
from megagrpo.platform.parallel.layout import Layout
from megagrpo.policy.build import build_model, weights_dtype
from megagrpo.policy.model_state import dense_state, load_state, sharded_state
from megagrpo.policy.transformer.transformer_config import ModelOptions
from megagrpo.weights.blocks.parameter_blocks import Parameter, blocks
from megagrpo.weights.files.data_only import data_only
from megagrpo.weights.files.file_checksums import checksums
from megagrpo.weights.files.gpt_checkpoint import GptKeys, common_state, extra_states
from megagrpo.weights.files.torch_dist import StoredTensors

HF_FILES = "hf"  # subfolder with config.json and the tokenizer, which an export needs
# The only sharding of the distributed optimizer's state that can be loaded with other tensor- and pipeline-parallel
# sizes. Weights do not need it, but with it checkpoints of weights and of training have the same metadata. With
# `mem_efficient`, one of the ranks that share parameters gathers their state over gloo and writes it; otherwise each
# rank would gather all of it.
METADATA = {
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": True,
}
CHECKED_RANKS = 64  # in larger worlds Megatron does not check shards: it would gather gigabytes on every rank


def model_state(chunks: list[nn.Module], layout: Layout) -> dict[str, Any]:
    """Return the chunks' sharded state: under "model" for one, "model0", "model1", ... for virtual pipeline stages."""
    metadata = METADATA | {"dp_cp_group": layout.dp_cp_group}
    return {name: dense_state(sharded_state(chunk, metadata)) for name, chunk in _named(chunks)}


@dataclass(frozen=True, eq=False)
class Part:
    """A parameter of this rank without data: its blocks of Hugging Face tensors, and its form in Megatron's checkpoint.

    The stored form has one or several pieces; `places` locates each piece in a whole tensor.
    """

    name: str
    shape: tuple[int, ...]
    blocks: list[Block]
    stored: ShardedTensor | ShardedTensorFactory
    places: list[ShardedTensor]

    def pieces(self, value: Tensor) -> list[ShardedTensor]:
        """Return the stored pieces of the parameter with the value `value` [shape], any dtype, as views of it."""
        if isinstance(self.stored, ShardedTensor):
            return [dataclasses.replace(self.stored, data=value, dtype=value.dtype)]
        return dataclasses.replace(self.stored, data=value).build()


@dataclass(frozen=True)
class Structure:
    """This rank's parameters of a model of any size, without data."""

    parts: list[Part]
    dtype: torch.dtype  # dtype of the parameters during training


def structure(hf_config: HfConfig, layout: Layout, keys: GptKeys | None = None) -> Structure:
    """Return this rank's part of the model, stored under the `keys` of GPTModel or by default of HybridModel.

    There is no communication. Raises ValueError if the layout cannot cut the model.
    """
    dtype = weights_dtype(hf_config)
    with without_data():
        chunks = build_model(hf_config, layout, ModelOptions(dtype=dtype, init_weights=False))
        state = model_state(chunks, layout)
        stored: dict[str, Any] = {}
        for i, own in enumerate(state.values()):
            if keys is not None:
                keys.apply(own)
            stored |= {f"chunk{i}.{name}" if i else name: value for name, value in own.items()}
        named = blocks(chunks, hf_config, layout)
        parts = [_part(name, param, of_param, stored.pop(name)) for name, param, of_param in named]
    assert not stored, f"stored without blocks: {[*stored]}"
    return Structure(parts, dtype)


def _part(name: str, param: Parameter, blocks: list[Block], stored: ShardedTensor | ShardedTensorFactory) -> Part:
    places = [stored] if isinstance(stored, ShardedTensor) else stored.build()
    return Part(name, tuple(param.shape), blocks, stored, places)


def save_frame(folder: Path, own: Structure, megatron_lm: HfConfig | None = None) -> None:
    """Write the files that make `folder` a distributed checkpoint without tensors. Collective.

    `own` is this rank's part. With the model `megatron_lm`, the files hold what Megatron-LM expects beside tensors.
    """
    state: dict[str, Any] = {}
    if megatron_lm is not None:
        places = (place for part in own.parts for place in part.places)
        state = common_state(megatron_lm) | dict(model=extra_states(places))
    # The default strategy needs a package that cannot be installed everywhere.
    dist_checkpointing.save(
        state,
        str(folder),
        content_metadata=METADATA,
        validate_access_integrity=_is_checked(),
        async_strategy="mcore",
    )


def read_state(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return a sharded state from a distributed checkpoint. Collective; raises errors of Megatron and torch."""
    with data_only(), warnings.catch_warnings():  # warnings about Megatron's calls of torch
        warnings.simplefilter("ignore", UserWarning)
        return dist_checkpointing.load(state, str(folder), validate_access_integrity=_is_checked())


def load_model(chunks: list[nn.Module], folder: str | Path, layout: Layout) -> None:
    """Load weights written in any layout, cast to the parameters' dtype; other contents are ignored. Collective.

    Raises ValueError when `folder` is not a distributed checkpoint or does not fit the model.
    """
    folder = Path(folder)
    check_is_checkpoint(folder)
    StoredTensors(folder)  # names a damaged index
    try:
        state = read_state(model_state(chunks, layout), folder)
    except Exception as e:  # torch and Megatron raise a dozen types for a missing key or another shape
        raise ValueError(f"{folder} does not fit this model: {e}") from e
    for name, chunk in _named(chunks):
        load_state(chunk, state[name])


def check_is_checkpoint(folder: Path) -> None:
    """Raises ValueError when `folder` is not a distributed checkpoint."""
    try:
        is_checkpoint = dist_checkpointing.check_is_distributed_checkpoint(str(folder))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{folder / 'metadata.json'} is corrupt: {error}; copy the checkpoint again") from None
    if not is_checkpoint:
        raise ValueError(f"{folder} is not a Megatron checkpoint: it lacks the metadata.json of dist_checkpointing")


def _named(chunks: list[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    return (("model" if len(chunks) == 1 else f"model{i}", chunk) for i, chunk in enumerate(chunks))


def sharded_rng(layout: Layout) -> ShardedObject:
    """Return this rank's RNG state. Every rank saves its own: replicas diverge as soon as one has more tokens."""
    state = [{"torch": torch.get_rng_state(), "tracker": get_cuda_rng_tracker().get_states()}]
    return ShardedObject("rng", state, (layout.world_size,), (layout.world_rank,), replica_id=0)


def restore_rng(saved: list[dict[str, Any]]) -> None:
    """Set this process's generators to the contents of a loaded `sharded_rng`."""
    torch.set_rng_state(saved[0]["torch"])
    get_cuda_rng_tracker().set_states(saved[0]["tracker"])


class ShardedWrite:
    """The write of this rank's part of `state` to `folder`. Only construction and `finish` are collective."""

    def __init__(self, state: dict[str, Any], folder: Path, metadata: dict[str, Any], background: bool):
        """Start the write. With `background`, the current values are copied to host memory and a thread writes them;
        otherwise this call writes."""
        self._folder = folder
        self._error: Exception | None = None
        self.ended = 0.0  # time.monotonic() at the end of this rank's write
        self._checksums: dict[str, str] = {}
        # The default strategy needs a package that cannot be installed everywhere.
        with _failures_as_os_errors():
            self._request = dist_checkpointing.save(
                state,
                str(folder),
                content_metadata=metadata,
                validate_access_integrity=_is_checked(),
                async_sharded_save=True,
                async_strategy="mcore",
            )
        _to_host(self._tensors, copy=background)
        # A daemon thread: a process that must exit at once leaves the checkpoint unfinished.
        self._thread = threading.Thread(target=self._run, name="checkpoint writer", daemon=True)
        self._thread.start() if background else self._run()

    @property
    def done(self) -> bool:
        """Whether this rank's part is written, or its write has failed."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until this rank's write ends."""
        if self._thread.ident is not None:
            self._thread.join()

    def result(self) -> dict[str, str]:
        """Wait for the write and return the checksums of this rank's files. Raises the error of a failed write."""
        self.wait()
        if self._error is not None:
            raise self._error
        return self._checksums

    def finish(self) -> None:
        """Write the files that complete the distributed checkpoint. Raises OSError on every rank when a rank could not
        write its part;
        only rank 0 knows which rank failed."""
        with _failures_as_os_errors():
            for finalize in self._request.finalize_fns:
                finalize()

    @property
    def _tensors(self) -> list[list[tuple[Any, torch.Tensor]]]:
        """The tensors that this rank writes, one list per file. The writer reads these same list objects."""
        buckets = self._request.async_fn_args[1] if self._request.async_fn is not None else []
        return [tensors for _, _, (_, tensors) in buckets]

    def _run(self) -> None:
        try:
            if self._request.async_fn is not None:
                self._request.async_fn(*self._request.async_fn_args)
                for tensors in self._tensors:
                    tensors.clear()  # otherwise the tensors would live until `finish`
                rank = torch.distributed.get_rank()
                self._checksums = checksums(self._folder, self._folder.glob(f"__{rank}_*.distcp"))
        except Exception as error:
            self._error = error
        self.ended = time.monotonic()


def sums_of_ranks(own: dict[str, str], layout: Layout) -> dict[str, str]:
    """Return the checksums of all ranks' tensor files by name, from those of this rank's files. Collective."""
    numbers = {int(Path(name).stem.rpartition("_")[2]): int(crc, 16) + 1 for name, crc in own.items()}
    count = int(layout.all_reduce(torch.tensor(max(numbers, default=-1) + 1), "max"))
    table = torch.zeros(layout.world_size, count, dtype=torch.int64)  # 0: the rank has no file of this number
    for number, value in numbers.items():
        table[layout.world_rank, number] = value
    table = layout.all_reduce(table)
    return {f"__{rank}_{n}.distcp": f"{int(table[rank, n]) - 1:08x}" for rank, n in table.nonzero().tolist()}


def _is_checked() -> bool:
    """Whether Megatron checks that the ranks' shards cover each tensor once. Every rank receives all ranks' lists."""
    return torch.distributed.get_world_size() <= CHECKED_RANKS


@contextmanager
def _failures_as_os_errors() -> Iterator[None]:
    try:
        yield
    except CheckpointException as error:  # CheckpointException is not a subclass of Exception
        who = ", ".join(f"rank {rank}" for rank in error.failures) or "a rank"
        raise OSError(f"{who} could not write its part (see the log)") from error


def _to_host(lists: list[list[tuple[Any, torch.Tensor]]], copy: bool) -> None:
    """Replace every tensor with one in host memory, a fresh copy if `copy`. Replaced tensors are freed one by one."""
    for tensors in lists:
        for i, (item, tensor) in enumerate(tensors):
            tensors[i] = item, tensor.to("cpu", copy=copy)
            del tensor


@contextlib.contextmanager
def without_data() -> Iterator[None]:
    """Tensors created inside this context have a shape and no data, on any requested device."""
    with _Alone(), FakeTensorMode():
        yield


class _Alone(TorchFunctionMode):
    """Skips all-reduces: pipeline stages that share tied embeddings do not make them equal."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return None if func is dist.all_reduce else func(*args, **(kwargs or {}))
