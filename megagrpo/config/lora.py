"""Defines the section `lora`: low-rank adapters, the projections that have one, and their sync to the engine."""

from __future__ import annotations

from collections.abc import Iterator
from math import sqrt
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from megagrpo.config.problems import Problem
from megagrpo.config.section import NonNegativeInt, PositiveFloat, Section

if TYPE_CHECKING:
    from megagrpo.config import RunConfig

# A model has either q_proj, k_proj and v_proj or qkv_proj, and either gate_proj and up_proj or gate_up_proj.
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "gate_proj", "up_proj", "gate_up_proj", "down_proj")
LARGEST_IN_VLLM = 512
ALL_LINEAR = "all-linear"


class LoraSection(Section):
    rank: NonNegativeInt = 0
    """Rank of the adapters, trained instead of the model's weights; 0 trains the weights themselves. docs/lora.md."""
    alpha: PositiveFloat = 32.0
    """The adapters' output is scaled by alpha / rank."""
    use_rslora: bool = False
    """Scale by alpha / sqrt(rank) instead (rsLoRA)."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the adapters' inputs set to 0 in training. Log-probs of reference and old policy use no dropout."""
    target_modules: list[str] | str = ALL_LINEAR
    """Projections with an adapter: `all-linear`, or a list of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj and
    down_proj; for fused weights qkv_proj and gate_up_proj. Experts have no adapters."""
    adapter_path: str | None = None
    """Adapter to continue from, a PEFT folder, also the reference. Empty: a new adapter; the model is the reference."""
    sync: Literal["merged", "adapter"] = "merged"
    """What vLLM gets. merged: whole weights with adapters. adapter: only adapters, applied to vLLM's own weights."""

    @property
    def enabled(self) -> bool:
        """Whether adapters are trained."""
        return self.rank > 0

    @property
    def syncs_adapters(self) -> bool:
        """Whether vLLM gets the adapters alone."""
        return self.enabled and self.sync == "adapter"

    @property
    def scale(self) -> float:
        """Factor on the adapters' output."""
        return self.alpha / (sqrt(self.rank) if self.use_rslora else self.rank)

    @property
    def projections(self) -> tuple[str, ...]:
        """The projections with an adapter, in the order of the forward pass."""
        return tuple(p for p in PROJECTIONS if self.target_modules == ALL_LINEAR or p in self.target_modules)


def lora_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield target modules that cannot have adapters, LoRA options without them, and options that exclude them."""
    lora, targets = config.lora, ("lora.target_modules",)
    choice = f"choose {ALL_LINEAR} or a list of {', '.join(PROJECTIONS)}"
    named = [lora.target_modules] if isinstance(lora.target_modules, str) else lora.target_modules
    if unknown := [name for name in named if name not in PROJECTIONS and lora.target_modules != ALL_LINEAR]:
        why = (
            "embeddings and LM head have no adapters"
            if {"lm_head", "embed_tokens"} & set(unknown)
            else "unknown projection"
        )
        yield Problem(targets, f"{', '.join(unknown)}: {why}; {choice}")
    if not named:
        yield Problem(targets, f"the list is empty, so nothing is trained; {choice}")
    if not lora.enabled and lora.adapter_path is not None:
        reason = f"{lora.adapter_path} needs lora.rank, the rank of that adapter"
        yield Problem(("lora.adapter_path", "lora.rank"), f"{reason}; set lora.rank, or leave the path empty")
    if not lora.enabled and lora.sync == "adapter":
        reason = "adapter needs adapters, but lora.rank is 0; set lora.rank, or choose merged"
        yield Problem(("lora.sync", "lora.rank"), reason)
    if lora.syncs_adapters and lora.rank > LARGEST_IN_VLLM:
        reason = f"{lora.rank} is above vLLM's limit for adapters, {LARGEST_IN_VLLM}"
        yield Problem(("lora.rank", "lora.sync"), f"{reason}; lower lora.rank, or set lora.sync to merged")
    storage = config.model.base_storage
    if storage != "none" and not lora.enabled:
        reason = f"{storage} needs frozen weights, but lora.rank is 0; set lora.rank, or choose none"
        yield Problem(("model.base_storage", "lora.rank"), reason)
    if storage != "none" and lora.syncs_adapters:
        reason = f"adapter leaves vLLM with unrounded weights, but model.base_storage {storage} trains rounded ones"
        yield Problem(("lora.sync", "lora.rank", "model.base_storage"), f"{reason}; choose merged")
    if lora.enabled and config.debug.dump_steps:
        reason = "megagrpo audit does not support adapters; leave dump_steps empty, or set lora.rank to 0"
        yield Problem(("debug.dump_steps", "lora.rank"), reason)
