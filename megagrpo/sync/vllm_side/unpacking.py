"""Loads packed weights into vLLM as the trainer does: computed to the model's dtype, under the model's names.

`--load-format megagrpo` selects this loader. The server's config.json then needs no `quantization_config`
(`--hf-overrides`), or vLLM would expect the packed tensors and keep them quantized, unlike the policy.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from megagrpo.families.hf_config import read_raw_config
from megagrpo.families.weight_sources import INDEX, SINGLE
from megagrpo.weights.precision.stored_views import model_tensors


class UnpackingLoader(DefaultModelLoader):
    """vLLM's loader with other tensors: those of the model, not those of the files."""

    def _get_weights_iterator(self, source: DefaultModelLoader.Source) -> Iterator[tuple[str, Tensor]]:
        return ((source.prefix + name, tensor) for name, tensor in unpacked(Path(source.model_or_path)))


def unpacked(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the model's tensors in the order of the files, one at a time in memory. The trainer has checked them."""
    index = folder / INDEX
    files = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.exists() else [SINGLE]
    opened: list[Any] = [safe_open(folder / file, framework="pt") for file in files]
    where = {name: file for file in opened for name in file.offset_keys()}

    @lru_cache(maxsize=1)  # one tensor may hold many of the model
    def get(name: str) -> Tensor:
        return where[name].get_tensor(name)

    stored = {name: tuple(file.get_slice(name).get_shape()) for name, file in where.items()}
    views, origins = model_tensors(read_raw_config(folder), stored, get)
    for name in origins:
        yield name, views[name].whole(get) if name in views else get(name)


@cache
def register_loader() -> None:
    """Register the loader in this process."""
    # imports most of vLLM
    from vllm.model_executor.model_loader import register_model_loader

    register_model_loader("megagrpo")(UnpackingLoader)
