"""Hugging Face folder -> this rank's parameters. Every rank reads only its own slices; no communication."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from megagrpo.bridge.families import blocks, fill, tensor_names
from megagrpo.bridge.sources import INDEX, SINGLE
from megagrpo.families import FAMILIES
from megagrpo.families.blocks import Block
from megagrpo.parallel.layout import Layout
from megagrpo.policy.hf_config import HfConfig


@torch.no_grad()
def load_hf(chunks: list[nn.Module], hf_config: HfConfig, folder: str | Path, layout: Layout) -> None:
    """Fill every parameter of `chunks` from the safetensors in `folder`, cast to the parameter's dtype.

    Raises ValueError, naming the tensors, when the folder lacks one, holds one of another shape, or holds one that the model has no
    place for on any rank.
    """
    wanted = list(blocks(chunks, hf_config, layout))
    with Checkpoint(folder) as checkpoint:
        dropped = FAMILIES[hf_config.family].dropped(hf_config)
        left_out = checkpoint.check_names({block.name for _, _, found in wanted for block in found}, tensor_names(hf_config), dropped)
        if left_out and layout.world_rank == 0:
            print(f"model: {len(left_out)} tensors of {folder} are not trained and left out: {_list(left_out)}", file=sys.stderr)
        for _, param, found in wanted:
            fill(param, found, checkpoint.read)


class Checkpoint:
    """The safetensors of a Hugging Face folder, single or sharded, opened lazily. A context manager."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.files = _weight_map(self.folder)  # tensor name -> file name
        self._stack = contextlib.ExitStack()
        self._open: dict[str, safe_open] = {}

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exc) -> None:
        self._stack.close()
        self._open.clear()

    def check_names(self, wanted: set[str], known: set[str], dropped: Sequence[str] = ()) -> list[str]:
        """The tensors on disk that are left out: those that an expression in `dropped` matches. ValueError when a `wanted` tensor is
        missing or another one is not among those `known` to the model."""
        missing = sorted(wanted - set(self.files))
        others = sorted(name for name in set(self.files) - known if not name.endswith("rotary_emb.inv_freq"))
        left_out = [name for name in others if any(re.fullmatch(pattern, name) for pattern in dropped)]
        unused = [name for name in others if name not in left_out]
        if fused := next((name for name in unused if name.endswith(".experts.gate_up_proj")), None):
            raise ValueError(
                f"model: {self.folder} holds all experts of a block in one tensor ({fused}); save one tensor per expert, as the "
                "save_pretrained of transformers does"
            )
        if missing:
            raise ValueError(f"model: {self.folder} lacks {_list(missing)}")
        if unused:
            raise ValueError(f"model: {self.folder} holds {_list(unused)}, which this architecture has no place for")
        return left_out

    def read(self, block: Block) -> Tensor:
        """The block's rows or columns as stored, [block_shape]. ValueError when the tensor on disk has another shape."""
        file = self.files[block.name]
        if file not in self._open:
            self._open[file] = self._stack.enter_context(safe_open(self.folder / file, framework="pt"))
        stored = self._open[file].get_slice(block.name)
        if tuple(stored.get_shape()) != block.shape:
            raise ValueError(
                f"model: {block.name} in {self.folder / file} has shape {tuple(stored.get_shape())}; config.json implies {block.shape}"
            )
        return stored[block.slices]


def _weight_map(folder: Path) -> dict[str, str]:
    if (folder / INDEX).exists():
        files = json.loads((folder / INDEX).read_text())["weight_map"]
        absent = sorted(name for name in set(files.values()) if not (folder / name).exists())
        if absent:
            raise ValueError(f"model: {folder} lacks {_list(absent)}, named in {INDEX}")
        return files
    if not (folder / SINGLE).exists():
        raise ValueError(f"model: {folder} holds neither {SINGLE} nor {INDEX}; only safetensors are read")
    with safe_open(folder / SINGLE, framework="pt") as file:
        return dict.fromkeys(file.keys(), SINGLE)


def _list(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more
