"""The parameters of Transformer Engine's layers in a model of every family: recorded where the package is installed,
read everywhere.

    python tests/distributed/te_manifest.py        # writes tests/vectors/te_manifest.json; Transformer Engine, and no
    GPU, is needed

It imports on a machine without a GPU when LD_LIBRARY_PATH names the CUDA libraries that came with torch
(site-packages/nvidia/*/lib). Nothing is computed.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # for `tests.family_examples`
    sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from te_kernels import replace_kernels
from tiny_families import MODELS, tiny_config
from torch import nn

from benchmarks.scaling.planned_layouts import imagined_layouts
from megagrpo.config import ParallelSection
from megagrpo.families.hf_config import parse_hf_config
from megagrpo.families.shared.architecture import HfConfig
from megagrpo.platform.parallel.layout import Layout, init_layout
from megagrpo.policy.build import build_model
from megagrpo.policy.fp8.fp8_settings import Fp8
from megagrpo.policy.model_state import sharded_state
from megagrpo.policy.transformer.transformer_config import ModelOptions, keep_in_bf16
from megagrpo.weights.blocks.parameter_blocks import BUFFERS
from megagrpo.weights.bridge.megatron_io import METADATA

FILE = Path(__file__).parents[1] / "vectors" / "te_manifest.json"
CASES = [*MODELS]
CUT = dict(tp=2, sequence_parallel=True, ep=2, etp=1)  # the layout beside one process
DTYPE = torch.bfloat16
Weights = dict[str, str]


def variants(hf_config: HfConfig, alone: Layout) -> list[tuple[Layout, bool]]:
    """(layout, whether linears are Megatron's own): one process; the last of two ranks in the layout CUT, without
    expert parallelism for dense families; one process with own linears."""
    sizes = CUT if hf_config.experts else dict(tp=2)
    last = list(imagined_layouts(alone, ParallelSection(**sizes), 2))[-1][1]
    return [(alone, False), (last, False), (alone, True)]


def architecture(name: str) -> HfConfig:
    """The tiny model of the case."""
    kind, extra = MODELS[name]
    return parse_hf_config(tiny_config(kind, extra).to_dict())


def chunk_of(hf_config: HfConfig, layout: Layout, own_linears: bool) -> nn.Module:
    """The model with uninitialized weights, with the layers that this process builds."""
    options = dict(init_weights=False, own_linears=own_linears, sequence_parallel=layout.parallel.tp > 1)
    (chunk,) = build_model(hf_config, layout, ModelOptions(dtype=DTYPE, **options))
    return chunk


def weights_of(chunk: nn.Module) -> Weights:
    """Name -> shape and special properties: the dim that tensor-parallel ranks cut, another dtype, whether it is a
    buffer."""
    found: Weights = {}
    buffers = [(name, buffer) for name, buffer in chunk.named_buffers() if name.endswith(BUFFERS)]
    for name, weight in (*chunk.named_parameters(), *buffers):
        said = ["x".join(map(str, weight.shape)) or "scalar"]
        said += [f"cut={weight.partition_dim}"] if getattr(weight, "tensor_model_parallel", False) else []
        said += [f"dtype={str(weight.dtype).removeprefix('torch.')}"] * (weight.dtype != DTYPE)
        found[name] = " ".join(said + ["buffer=1"] * (not isinstance(weight, nn.Parameter)))
    return found


def checkpoint_keys(chunk: nn.Module, layout: Layout) -> list[str]:
    """The keys of the model's tensors and objects in a checkpoint."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values

    state = sharded_state(chunk, METADATA | dict(dp_cp_group=layout.dp_cp_group))
    return sorted({entry.key for entry in nested_values(state) if hasattr(entry, "key")})


def recorded_chunk(weights: Weights, num_layers: int) -> nn.Module:
    """A module with these weights, without data, in the hybrid layers of the model; it cannot compute."""
    chunk = nn.Module()
    chunk.decoder = nn.Module()
    chunk.decoder.layers = nn.ModuleList(nn.Module() for _ in range(num_layers))
    for number, layer in enumerate(chunk.decoder.layers, 1):
        layer.layer_number = number
    for name, said in weights.items():
        *path, last = name.split(".")
        module = chunk
        for step in path:
            if not hasattr(module, step):
                setattr(module, step, nn.Module())
            module = getattr(module, step)
        shape, *more = said.split()
        options = dict(option.split("=") for option in more)
        sizes = [] if shape == "scalar" else list(map(int, shape.split("x")))
        weight = torch.empty(sizes, dtype=getattr(torch, options.get("dtype", "bfloat16")), device="meta")
        if "buffer" in options:
            module.register_buffer(last, weight)
            continue
        weight = nn.Parameter(weight)
        weight.tensor_model_parallel, weight.partition_dim = "cut" in options, int(options.get("cut", -1))
        setattr(module, last, weight)
    return chunk


def fp8_recipe(recipe: str, form: str) -> str:
    """Return megatron-core's recipe for the keys, as Transformer Engine prints it; asserts which layers stay in
    bf16."""
    from megatron.core import fp8_utils
    from megatron.core.transformer.transformer_config import TransformerConfig

    fp8 = Fp8(recipe, form == "hybrid")
    config = TransformerConfig(num_layers=4, hidden_size=64, num_attention_heads=1, **fp8.megatron_config())
    keep_in_bf16(config, [0, 3])
    contexts = [fp8_utils.get_fp8_context(config, layer) for layer in range(4)]
    assert [isinstance(context, nullcontext) for context in contexts] == [True, False, False, True]
    return repr(fp8_utils.get_fp8_recipe(config))


def record() -> dict[str, Any]:
    """Record every family, with Transformer Engine's linears and with Megatron's own."""
    replace_kernels()  # Transformer Engine requires CUDA to make a layer, and never computes here
    alone = init_layout(ParallelSection())
    models, keys = {}, {}
    for name in CASES:
        hf_config = architecture(name)
        models[name] = [weights_of(chunk_of(hf_config, *variant)) for variant in variants(hf_config, alone)]
        keys[name] = checkpoint_keys(chunk_of(hf_config, alone, own_linears=False), alone)
        print(name, len(models[name][0]), len(keys[name]), file=sys.stderr)
    recipes = {
        f"{recipe} {form}": fp8_recipe(recipe, form)
        for recipe in ("tensorwise", "blockwise", "mxfp8")
        for form in ("e4m3", "hybrid")
    }
    packages = ("torch", "megatron-core", "transformer-engine")
    made_by = "tests/distributed/te_manifest.py: " + ", ".join(f"{p} {version(p)}" for p in packages)
    return {
        "produced_by": made_by,
        "models": models,
        "checkpoint_keys": keys,
        "recipes": recipes,
    }


if __name__ == "__main__":
    FILE.write_text(json.dumps(record(), separators=(",", ":")) + "\n")
