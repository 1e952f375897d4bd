"""Loads, saves and merges PEFT adapters in any layout: folders of adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from megagrpo.config import LoraSection
from megagrpo.config.sections.lora import ALL_LINEAR
from megagrpo.families.hf_config import HfConfig, load_hf_config
from megagrpo.families.shared.blocks import Block
from megagrpo.families.shared.wrapper import Naming
from megagrpo.families.weight_sources import new_folder, resolve_model, shared_name
from megagrpo.platform.parallel.agree import run_own_and_agree
from megagrpo.platform.parallel.layout import Layout
from megagrpo.platform.process.progress_hook import SILENT, Progress
from megagrpo.policy.build import build_model, weights_dtype
from megagrpo.policy.lora.lora_layers import adapters, attach_adapters
from megagrpo.policy.transformer.transformer_config import ModelOptions
from megagrpo.weights.blocks.parameter_blocks import PEFT, adapter_blocks, fill
from megagrpo.weights.bridge.hf_export import Parameters, Source, Stream, refuse_non_empty, save_folder, save_hf
from megagrpo.weights.bridge.hf_files import File, Files, Rounded, Writer
from megagrpo.weights.bridge.load import load_hf
from megagrpo.weights.files.file_checksums import verify_inside
from megagrpo.weights.files.partial_files import refuse_taken
from megagrpo.weights.files.tensor_files import TensorFile, first_bad, make_header

ADAPTER_FILES = "adapter"  # subfolder of a checkpoint
RUN_KEY = "lora.adapter_path"  # the config key in a run's error messages; a tool passes its own argument
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# PEFT's options beyond adapters of one rank, with the value that disables each option.
PLAIN: dict[str, Any] = dict(bias="none", rank_pattern={}, alpha_pattern={}, modules_to_save=None, use_dora=False)
# options that narrow PEFT's selection of modules; `lora` has others
UNUSED = dict(exclude_modules=None, layers_pattern=None)


@torch.no_grad()
def fill_adapters(chunks: list[nn.Module], hf_config: HfConfig, layout: Layout, lora: LoraSection, seed: int) -> None:
    """Load the adapter of `lora.adapter_path`, or initialize a fresh adapter of the loaded model. Collective."""
    if lora.adapter_path is not None:
        load_adapter(chunks, hf_config, layout, Path(os.path.expanduser(lora.adapter_path)), lora)
        return
    for _, param, blocks in adapter_blocks(chunks, hf_config, layout):
        fill(param, blocks, lambda block: _fresh(block, seed))


def _fresh(block: Block, seed: int) -> Tensor:
    """Return the block [block_shape] of a fresh A or B. Each expert is initialized by itself."""
    if len(block.shape) == 2:
        return fresh_matrix(block.name, block.shape, seed)[block.slices]
    if "lora_B" in block.name:
        return torch.zeros(block.block_shape)
    return fresh_matrix(f"{block.name} {block.box[0][0]}", block.shape[1:], seed)[None, *block.slices[1:]]


def fresh_matrix(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Return the whole A or B `name`, initialized as in PEFT: A uniform within 1 / sqrt(in), B zero, float32 `shape`.

    So a fresh adapter adds 0. The values depend only on the arguments: every layout starts with the same adapter.
    """
    if "lora_B" in name:
        return torch.zeros(shape)
    generator = torch.Generator().manual_seed(crc32(f"{seed} {name}".encode()))
    return (2 * torch.rand(shape, generator=generator) - 1) * shape[1] ** -0.5


@torch.no_grad()
def load_adapter(
    chunks: list[nn.Module], hf_config: HfConfig, layout: Layout, folder: Path, lora: LoraSection, key: str = RUN_KEY
) -> None:
    """Fill the adapters from a folder that PEFT or `save_adapter` has written. Collective.

    Raises ValueError, with the fix, when rank, scale, projections or shapes differ from `lora` and the model, or a
    value is NaN or infinite. `key` is the config key or the argument that named the folder.
    """
    saved = read_lora(folder, key)
    for name in ("rank", "alpha"):
        wanted, made = getattr(lora, name), getattr(saved, name)
        if not math.isclose(wanted, made):
            raise ValueError(f"lora.{name}: {wanted}, but the adapter in {folder} has {made}; set it to {made}")
    adapters = [(param, blocks) for _, param, blocks in adapter_blocks(chunks, hf_config, layout)]
    names = {name for names in layout.all_gather_objects([blocks[0].name for _, blocks in adapters]) for name in names}
    file = TensorFile(folder / WEIGHTS)
    if odd := sorted(names ^ set(file.entries)):
        where = "the model" if odd[0] in names else str(folder)
        what = f"{odd[0]} is only in {where} ({len(odd)} such tensors)"
        if key == RUN_KEY:
            fix = "name the adapter's projections, layers and experts as its adapter_config.json does"
            raise ValueError(f"lora.target_modules: {what}; {fix}")
        raise ValueError(f"{key}: {what}; name the model that the adapter was trained on")

    @lru_cache(maxsize=4)  # the experts of a layer share two or four
    def stored(name: str, shape: tuple[int, ...]) -> Tensor:
        tensor, needed = file.tensor(name), in_file(name, shape)
        if tuple(tensor.shape) != needed:
            lengths = f"{list(tensor.shape)}; the model needs {list(needed)}"
            raise ValueError(f"{key}: {name} in {folder} has shape {lengths}")
        if bad := first_bad(tensor):
            raise ValueError(f"{key}: {name} in {folder} holds {bad}; the adapter is broken: use another")
        return tensor.view(shape)

    for param, blocks in adapters:
        fill(param, blocks, lambda block: stored(block.name, block.shape)[block.slices])


def in_file(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape in PEFT's files of the tensor `name`: A or B of all experts is flattened to a matrix."""
    if len(shape) < 3:
        return shape
    first, middle, last = shape
    return (first * middle, last) if "lora_A" in name else (first, middle * last)


def read_lora(folder: Path, key: str = RUN_KEY) -> LoraSection:
    """Return the config section of the adapter in `folder`. `key` is the config key or argument that named the folder.

    Raises ValueError when the folder holds no adapter, is damaged, or holds an unsupported kind of adapter.
    """
    for file in (CONFIG, WEIGHTS):
        if not (folder / file).is_file():
            raise ValueError(f"{key}: {folder} has no {file}; name an adapter folder of PEFT or of a run's checkpoint")
    verify_inside(folder)
    saved = _config_of(folder, key)
    odd = ["peft_type"] if saved.get("peft_type") != "LORA" else []
    odd += [name for name, plain in (PLAIN | UNUSED).items() if (saved.get(name) or plain) != plain]
    if odd:
        what = f"{odd[0]} {saved.get(odd[0])}; only LoRA of one rank is supported"
        raise ValueError(f"{key}: the adapter in {folder} has {what}")
    modules, layers = saved["target_modules"] or [], saved.get("layers_to_transform")
    return LoraSection(
        rank=saved["r"],
        alpha=saved["lora_alpha"] * (math.sqrt(saved["r"]) if saved.get("use_rslora") else 1),
        dropout=saved.get("lora_dropout", 0),
        target_modules=modules if isinstance(modules, str) else sorted(modules),
        target_parameters=sorted(saved.get("target_parameters") or []),
        layers_to_transform=[layers] if isinstance(layers, int) else layers or None,
    )


def _config_of(folder: Path, key: str) -> dict[str, Any]:
    try:
        saved = json.loads((folder / CONFIG).read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{key}: {folder / CONFIG} is no JSON ({error}); copy the adapter again") from None
    lacks = [name for name in ("r", "lora_alpha", "target_modules") if not isinstance(saved, dict) or name not in saved]
    if lacks and not (isinstance(saved, dict) and saved.get("peft_type") not in (None, "LORA")):
        raise ValueError(f"{key}: {folder / CONFIG} has no {lacks[0]}; name an adapter that PEFT has saved")
    return saved


def base_of(folder: Path) -> str:
    """Return the base model of the adapter in `folder`. Raises ValueError when adapter_config.json does not name it."""
    name = json.loads((folder / CONFIG).read_text()).get("base_model_name_or_path")
    if not name:
        raise ValueError(f"{folder / CONFIG} names no base model; set it with --model")
    return name


def export_adapter(folder: Path, out: Path, base: str | None = None) -> None:
    """Copy the adapter in `folder` to `out`. `base` replaces adapter_config.json's base model. One process calls it.

    Raises ValueError when `folder` holds no adapter or a damaged one, no base model is named, or `out` is not empty.
    Raises OSError when `out` cannot be written.
    """
    read_lora(folder, "CHECKPOINT")
    refuse_taken(out)
    saved = json.loads((folder / CONFIG).read_text())
    saved["base_model_name_or_path"] = shared_name(base or base_of(folder))
    with new_folder(out) as unfinished:
        shutil.copyfile(folder / WEIGHTS, unfinished / WEIGHTS)
        (unfinished / CONFIG).write_text(json.dumps(saved, indent=2))


def save_adapter(
    parameters: Parameters,
    layout: Layout,
    sources: dict[str, Source],
    folder: Path,
    lora: LoraSection,
    base: str,
    dtype: torch.dtype,
    look: Callable[[str, Tensor], None] = lambda name, tensor: None,
) -> None:
    """Write adapters as a folder that PEFT, vLLM and `load_adapter` read. Collective.

    `parameters` comes from `adapter_blocks`, `sources` from `find_sources` of them, once for all calls. `base` is the
    base model as the user named it; a folder of the hub's cache is written as its hub name. `dtype` is the dtype of A
    and B in the file. `look` receives every whole A [rank, in] and B [out, rank] in it on rank 0. The folder
    appears complete or not at all. Raises OSError on every rank when it cannot be written.
    """

    def write(tensors: Stream, sources: dict[str, Source], unfinished: Path) -> None:
        header = make_header({name: (dtype, in_file(name, source.shape)) for name, source in sources.items()})
        with Writer(unfinished, Files((File(WEIGHTS, header),), None)) as writer:
            for name, tensor in tensors:
                look(name, tensor.to(dtype))
                writer.write(name, tensor.reshape(in_file(name, tuple(tensor.shape))))
        modules = {name.rpartition(".lora_")[0] for name in sources if ".experts." not in name}
        projections = sorted({module.rpartition(".")[2] for module in modules})
        saved = adapter_config(lora, projections, base)
        decoders = {module.removeprefix(PEFT).partition("layers.")[0] for module in modules} - {Naming().decoder}
        if decoders and not lora.expression:  # inside a multimodal model, whose towers have projections of these names
            (decoder,) = decoders
            saved["target_modules"] = rf"{re.escape(decoder)}.*\.({'|'.join(projections)})"
        (unfinished / CONFIG).write_text(json.dumps(saved, indent=2))

    save_folder(folder, parameters, layout, sources, write)


def adapter_config(lora: LoraSection, projections: list[str], base: str) -> dict[str, Any]:
    """Return the contents of adapter_config.json. For `all-linear` it names the `projections`, as PEFT does."""
    alpha = int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha
    own: dict[str, Any] = dict(r=lora.rank, lora_alpha=alpha, lora_dropout=lora.dropout)
    own |= dict(target_modules=projections if lora.target_modules == ALL_LINEAR else lora.expression or lora.names)
    own |= dict(target_parameters=lora.target_parameters) if lora.target_parameters else {}
    about: dict[str, Any] = dict(peft_type="LORA", task_type="CAUSAL_LM", base_model_name_or_path=shared_name(base))
    about |= dict(inference_mode=True, fan_in_fan_out=False)
    return about | own | PLAIN | dict(layers_to_transform=lora.layers_to_transform, init_lora_weights=True)


MERGE_ARGUMENT = "ADAPTER"  # name of the command-line argument in errors


def merge(
    adapter: Path,
    out: Path,
    model: str | None,
    layout: Layout,
    progress: Progress = SILENT,
    dtype: torch.dtype | None = None,
) -> Rounded:
    """Write the merged model to `out`: safetensors, config and tokenizer. Collective. `dtype`, `progress` and the
    result are as in `save_hf`."""
    lora = read_lora(adapter, MERGE_ARGUMENT)
    refuse_non_empty(out, layout)  # before the whole model is read
    key = "--model" if model else f"{adapter / CONFIG} (or name one with --model)"
    source = resolve_model(model or base_of(adapter), key)
    hf_config = load_hf_config(source)
    chunks = build_model(
        hf_config,
        layout,
        ModelOptions(
            dtype=weights_dtype(hf_config),
            init_weights=False,
            own_linears=True,
            own_experts=lora.in_experts,
        ),
    )
    attach_adapters(chunks, hf_config, lora, recompute="none")
    for added in adapters(chunks):
        # the file holds A and B in float32; in the model's bfloat16 they would be rounded before the sum is
        added.float()
    run_own_and_agree(layout, lambda: load_hf(chunks, hf_config, source, layout, progress))
    load_adapter(chunks, hf_config, layout, adapter, lora, MERGE_ARGUMENT)
    return save_hf(chunks, hf_config, layout, out, source, dtype=dtype, progress=progress)
