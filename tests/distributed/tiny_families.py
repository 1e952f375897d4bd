"""Tiny random models of every family, as transformers builds them. Their keys are in `family_examples`."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from megagrpo.families.family_index import FAMILIES
from megagrpo.families.shared.family import Family
from megagrpo.families.shared.wrapper import THINKER
from tests.family_examples import EXAMPLES, TINY_SIZES

# Name of the case -> the family in transformers' class names, and its config beyond TINY_SIZES.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    name: (family.architecture.removesuffix("ForCausalLM"), extra)
    for family in FAMILIES.values()
    for name, extra in EXAMPLES[family.model_type].cases.items()
}
# The same of multimodal models around them; the keys of the whole model are in `WHOLE`.
WHOLE = "whole"
WRAPPED: dict[str, tuple[str, dict[str, Any]]] = {
    f"{wrapper.model_type} multimodal": (
        wrapper.architecture,
        dict(model_type=(*wrapper.texts, family.model_type)[0])
        | next(iter(EXAMPLES[family.model_type].cases.values()))
        | {WHOLE: EXAMPLES[family.model_type].wrapped[wrapper.model_type]},
    )
    for family in FAMILIES.values()
    for wrapper in family.wrappers
    if wrapper.model_type in EXAMPLES[family.model_type].wrapped
}
EVERY = MODELS | WRAPPED


def cases_of(family: Family) -> list[str]:
    """The names of the family's cases, multimodal ones last."""
    example = EXAMPLES[family.model_type]
    return [*example.cases, *(f"{kind} multimodal" for kind in example.wrapped)]


def family_of(name: str) -> Family:
    """The family of a case."""
    return next(family for family in FAMILIES.values() if name in cases_of(family))


def has_experts(name: str) -> bool:
    """Whether a case is a mixture of experts."""
    return any("experts" in key and value for key, value in EVERY[name][1].items())


def on_one_stage(name: str) -> bool:
    """Whether pipeline stages cannot share a case."""
    keys = EVERY[name][1]
    return bool((keys | keys.get(WHOLE, {}).get("text_config", {})).get("num_kv_shared_layers"))


def class_of(kind: str) -> type:
    """transformers' class of a case."""
    import transformers

    if kind == "KimiK25ForConditionalGeneration":
        from tiny_kimi import published_class

        return published_class()
    return getattr(transformers, kind if "For" in kind else f"{kind}ForCausalLM")


def tiny_config(kind: str, extra: dict[str, Any]) -> Any:
    """The configuration of a tiny model; `extra` is kept unchanged, because transformers writes rotary parameters into
    it."""
    # Only the eager attention of transformers caps scores.
    keys = copy.deepcopy(TINY_SIZES | extra)
    if (whole := keys.pop(WHOLE, None)) is not None:
        inside = whole.get(THINKER, whole)
        text = dict(text_config=keys | inside.get("text_config", {}))
        keys = whole | ({THINKER: inside | text} if THINKER in whole else text)
    return class_of(kind).config_class(**keys, attn_implementation="eager")


def tiny_model(kind: str, extra: dict[str, Any]) -> torch.nn.Module:
    """Random weights, the same on every call."""
    torch.manual_seed(0)
    config = tiny_config(kind, extra)
    model = class_of(kind)(config).eval()
    if hasattr(model, "thinker"):
        model.forward = model.thinker.forward  # the whole model generates speech only
        for name, parameter in model.named_parameters():
            if name.startswith("talker"):  # transformers leaves its experts uninitialised
                parameter.data.normal_(0, 0.1)
    with torch.no_grad():
        # Norms and biases start as ones and zeros, which hides swapped tensors. Buffers: the biases of expert
        # selection.
        for name, p in (*model.named_parameters(), *model.named_buffers()):
            buffer = not isinstance(p, torch.nn.Parameter)
            if (p.dim() == 1 and (name.endswith("bias") or not buffer)) or name.endswith(
                ("correction_bias", "layer_scalar", "expert_bias")
            ):
                p.add_(torch.randn_like(p) * 0.1)
    return model


def write_model(model: torch.nn.Module, folder: Path, **options: Any) -> None:
    """Save a model with the experts of Qwen3-VL as in its releases: transformers saves them as it holds them."""
    model.save_pretrained(folder, **options)
    if model.config.model_type == "qwen3_vl_moe":
        for file in folder.glob("*.safetensors"):
            tensors = load_file(file)
            swapped = {name: tensor.mT.contiguous() for name, tensor in tensors.items() if ".experts." in name}
            save_file(tensors | swapped, file, metadata={"format": "pt"})
