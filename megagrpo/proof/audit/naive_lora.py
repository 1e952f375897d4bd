"""LoRA (arXiv 2106.09685) in float64 on transformers' model: every adapted weight is W + scale B A, read from the files
that PEFT writes."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.utils import parametrize

PREFIX, BASE = "base_model.model.", ".base_layer"  # PEFT's, around the module's name
ENDS = ("lora_A.weight", "lora_B.weight")  # of PEFT's names of tensors


class _Sum(nn.Module):
    """W + scale B A. The weights [experts, ...] of all experts have A [experts x rank, in], B [out, rank x experts].

    `trained` has A and B by the ends of their names in PEFT's files.
    """

    def __init__(self, name: str, trained: dict[str, Tensor], scale: float, transposed: bool):
        super().__init__()
        self.name, self.scale, self.transposed = name, scale, transposed
        self.ends, self.trained = tuple(trained), nn.ParameterList(tensor.double() for tensor in trained.values())

    def forward(self, weight: Tensor) -> Tensor:
        """Return the weight with its adapter, in the weight's shape."""
        a, b = self.trained
        if weight.dim() == 2:
            return weight + self.scale * b @ a
        a, b = a.unflatten(0, (len(weight), -1)), b.unflatten(1, (-1, len(weight)))
        return weight + self.scale * torch.einsum("ore,eri->eio" if self.transposed else "ore,eri->eoi", b, a)


def add_adapter(model: nn.Module, folder: Path) -> None:
    """Add the adapter in the PEFT folder `folder` to a float64 model, whose own weights get no gradient from now on."""
    saved = json.loads((folder / "adapter_config.json").read_text())
    scale = saved["lora_alpha"] / saved["r"] ** (0.5 if saved.get("use_rslora") else 1)
    tensors = load_file(folder / "adapter_model.safetensors")
    model.requires_grad_(False)
    for name in sorted({name.rpartition(".lora_")[0] for name in tensors}):
        module = model.get_submodule(name.removeprefix(PREFIX).removesuffix(BASE))
        trained = {end: tensors[f"{name}.{end}"] for end in ENDS}
        a, b = trained.values()
        transposed = getattr(module, "is_transposed", False)
        own = _Sum(name, trained, scale, transposed)
        parametrize.register_parametrization(module, _parameter(module, a, b, transposed), own)


def _parameter(module: nn.Module, a: Tensor, b: Tensor, transposed: bool) -> str:
    """Return the name of the module's parameter that the adapter fits: a linear's weight, or one of all experts'."""
    if hasattr(module, "weight"):
        return "weight"
    shape = (a.shape[1], b.shape[0]) if transposed else (b.shape[0], a.shape[1])
    (name,) = [name for name, p in module.named_parameters(recurse=False) if p.dim() == 3 and p.shape[1:] == shape]
    return name


def adapter_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of the model's adapter by their names in PEFT's files; empty without one."""
    adapters = [module for module in model.modules() if isinstance(module, _Sum)]
    return {f"{one.name}.{end}": one.trained[index] for one in adapters for index, end in enumerate(one.ends)}
