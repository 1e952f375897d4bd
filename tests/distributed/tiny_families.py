"""Tiny random models of every family, as transformers builds them. Their keys are in the families' files."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers

from megagrpo.models.families import FAMILIES
from megagrpo.models.families.example import TINY_SIZES
from megagrpo.models.families.family import Family

# Name of the case -> the family in transformers' class names, and its config beyond TINY_SIZES.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    name: (family.architecture.removesuffix("ForCausalLM"), extra)
    for family in FAMILIES.values()
    for name, extra in family.example.cases.items()
}


def family_of(name: str) -> Family:
    """The family of a case."""
    return next(family for family in FAMILIES.values() if name in family.example.cases)


def has_experts(name: str) -> bool:
    """Whether a case is a mixture of experts."""
    return any("experts" in key and value for key, value in MODELS[name][1].items())


def tiny_config(kind: str, extra: dict[str, Any]) -> transformers.PretrainedConfig:
    """The configuration of a tiny model; `extra` is kept unchanged, because transformers writes rotary parameters into
    it."""
    # Only the eager attention of transformers caps scores.
    config = getattr(transformers, f"{kind}ForCausalLM").config_class
    return config(**copy.deepcopy(TINY_SIZES | extra), attn_implementation="eager")


def tiny_model(kind: str, extra: dict[str, Any]) -> torch.nn.Module:
    """Random weights, the same on every call."""
    torch.manual_seed(0)
    config = tiny_config(kind, extra)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        # Norms and biases start as ones and zeros, which hides swapped tensors. Buffers: the biases of expert
        # selection.
        for name, p in (*model.named_parameters(), *model.named_buffers()):
            buffer = not isinstance(p, torch.nn.Parameter)
            if (p.dim() == 1 and (name.endswith("bias") or not buffer)) or name.endswith("correction_bias"):
                p.add_(torch.randn_like(p) * 0.1)
    return model
