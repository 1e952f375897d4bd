"""The boxes that planning expects vLLM's workers to read are those that vLLM's loaders copy, for every way to cut a
model."""

import functools
import importlib
import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks.scaling.loader_slices import EngineLayout, wanted_boxes
from megagrpo.families.hf_config import load_hf_config
from megagrpo.families.shared.boxes import Box, size
from megagrpo.sync.vllm_side.lazy_tensors import LazyTensor, box_of
from tests.distributed.ranks import run_ranks
from tests.e2e.tiny_servers import model_folder, weights


@dataclass
class Listener:
    """A source of lazy tensors that records what loaders copy."""

    shapes: dict[str, tuple[int, ...]]
    boxes: dict[str, list[Box]] = field(default_factory=dict)

    def announce(self, name, view, destination):
        box, strides = box_of(view, self.shapes[name])
        assert strides is not None, name
        self.boxes.setdefault(name, []).append(box)

    def fetch(self, name, view):
        return torch.zeros(view.shape)

    def fill(self, name, view, destination):
        destination.zero_()


def copied_by_loaders(folder, shapes, tp, pp, expert_parallel):
    """The boxes that this rank's part of vLLM's model copies when it loads tensors of these shapes."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed.parallel_state import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    arguments = EngineArgs(
        model=str(folder),
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=128,
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        enable_expert_parallel=expert_parallel,
        enforce_eager=True,
        distributed_executor_backend="mp",
    )
    config = arguments.create_engine_config()
    listener = Listener(shapes)
    with set_current_vllm_config(config):
        init_distributed_environment(dist.get_world_size(), dist.get_rank(), local_rank=dist.get_rank(), backend="gloo")
        ensure_model_parallel_initialized(tp, pp, backend="gloo")
        model = initialize_model(config)
        model.load_weights(
            [(name, LazyTensor.of(name, shape, torch.float32, listener)) for name, shape in shapes.items()]
        )
    return listener.boxes


@functools.cache
def shapes_of(kind):
    return {name: tuple(tensor.shape) for name, tensor in weights(model_folder(kind)).items()}


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("qwen3_moe", EngineLayout(tp=2, ep=2)),
        pytest.param("qwen3_moe", EngineLayout(tp=2), marks=pytest.mark.full),
        pytest.param("qwen3_next", EngineLayout(tp=2), marks=pytest.mark.full),
        pytest.param("qwen3_5_moe", EngineLayout(tp=2), marks=pytest.mark.full),
        pytest.param("granitemoehybrid", EngineLayout(tp=2), marks=pytest.mark.full),  # both workers have the one group
        pytest.param("nemotron_h", EngineLayout(tp=2), marks=pytest.mark.full),
        pytest.param("qwen2", EngineLayout(tp=2, pp=2), marks=pytest.mark.full),
        pytest.param("llama", EngineLayout(tp=4), marks=pytest.mark.full),  # twice as many workers as key-value heads
    ],
    ids=str,
)
def test_planned_boxes_are_those_that_vllms_loaders_copy(kind, layout):
    importlib.import_module("vllm.engine.arg_utils")  # once, before the ranks are forked
    folder, shapes = model_folder(kind), shapes_of(kind)
    name = f"cuts{os.getpid()}_{secrets.token_hex(4)}"  # vLLM's workers share this memory and leave it behind
    arguments = (folder, shapes, layout.tp, layout.pp, layout.ep > 1)
    try:
        found = run_ranks(copied_by_loaders, layout.workers, *arguments, env={"VLLM_DIST_IDENT": name})
    finally:
        for file in Path("/dev/shm").glob(f"*{name}*"):
            file.unlink()
    told = wanted_boxes(shapes, load_hf_config(folder), layout)
    for worker in range(layout.workers):
        wanted = {name: sorted(box for box, on in boxes.items() if worker in on) for name, boxes in told.items()}
        copied = {name: sorted({box for box in boxes if size(box)}) for name, boxes in found[worker].items()}
        assert {name: boxes for name, boxes in copied.items() if boxes} == {
            name: boxes for name, boxes in wanted.items() if boxes
        }, worker
