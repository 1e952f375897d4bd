"""Defines the section `lora`: low-rank adapters, the projections that have one, and their sync to the engine."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from megagrpo.config.basics.problems import Problem
from megagrpo.config.sections.section import NonNegativeInt, PositiveFloat, Section

if TYPE_CHECKING:
    from megagrpo.config import RunConfig

# A model has either q_proj, k_proj and v_proj or qkv_proj, and either gate_proj and up_proj or gate_up_proj. Latent
# attention has q_proj, or q_a_proj and q_b_proj, and the two of kv. Gated DeltaNet has out_proj and those that begin
# with in_proj_, Mamba-2 in_proj and out_proj.
PROJECTIONS = (
    *("q_proj", "k_proj", "v_proj", "qkv_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
    *("in_proj", *(f"in_proj_{parts}" for parts in ("qkvz", "ba", "qkv", "z", "b", "a"))),
    *("out_proj", "gate_proj", "up_proj", "gate_up_proj", "down_proj"),
)
EXPERT_PROJECTIONS = ("gate_up_proj", "up_proj", "down_proj")
LARGEST_IN_VLLM = 512
ALL_LINEAR = "all-linear"
_OUTSIDE = ("lm_head", "model.embed_tokens")  # modules that never have an adapter


class LoraSection(Section):
    rank: NonNegativeInt = 0
    """Rank of the adapters, trained instead of the model's weights; 0 trains the weights themselves. docs/lora.md."""
    alpha: PositiveFloat = 32.0
    """The adapters' output is scaled by alpha / rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the adapters' inputs set to 0 in training. Log-probs of reference and old policy use no dropout."""
    target_modules: list[str] | str = ALL_LINEAR
    """Projections with an adapter: `all-linear`, a list of names that `megagrpo plan` prints, such as q_proj
    or layers.0.mlp.up_proj, or a regular expression for whole names. Experts: `target_parameters`."""
    layers_to_transform: list[NonNegativeInt] | None = None
    """Layers with adapters, counted from 0. null: all layers. For one regular expression leave it null, as in PEFT."""
    adapter_path: str | None = None
    """Adapter to continue from, a PEFT folder, also the reference. Empty: a new adapter; the model is the reference."""
    target_parameters: list[str] = []
    """Experts with adapters: `experts.gate_up_proj`, `experts.down_proj`, or both. Each expert has its own A and B. The
    names are those of PEFT's key; a longer one, such as layers.0.mlp.experts.down_proj, means one layer."""
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
    def in_experts(self) -> bool:
        """Whether experts have adapters."""
        return self.enabled and bool(self.target_parameters)

    @property
    def scale(self) -> float:
        """Factor on the adapters' output."""
        return self.alpha / self.rank

    @property
    def names(self) -> list[str] | None:
        """The names of `target_modules`; None for `all-linear` and for a regular expression."""
        targets = self.target_modules
        if isinstance(targets, str):
            return [targets] if targets.isidentifier() else None
        return targets

    @property
    def expression(self) -> str | None:
        """The regular expression of `target_modules`; None if it is none."""
        targets = self.target_modules
        return targets if isinstance(targets, str) and targets != ALL_LINEAR and self.names is None else None

    def adapts(self, module: str) -> bool:
        """Whether the linear `module` of a decoder layer, such as model.layers.0.self_attn.q_proj, has an adapter.

        The rules are those of PEFT: a name in `target_modules` is the end of the module's, and a regular expression
        matches all of it.
        """
        if self.expression is not None:
            return re.fullmatch(self.expression, module) is not None
        layers, names = self.layers_to_transform, self.names
        if layers is not None and int(module.split(".layers.")[1].split(".")[0]) not in layers:
            return False
        return names is None or any(f".{module}".endswith(f".{name}") for name in names)

    def adapts_experts(self, parameter: str) -> bool:
        """Whether the experts' `parameter`, such as model.layers.0.mlp.experts.down_proj, has adapters."""
        return any(f".{parameter}".endswith(f".{name}") for name in self.target_parameters)


def lora_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield target modules that cannot have adapters, LoRA options without them, and options that exclude them."""
    lora = config.lora
    yield from _target_problems(lora)
    if not lora.enabled and lora.adapter_path is not None:
        reason = f"{lora.adapter_path} needs lora.rank, the rank of that adapter"
        yield Problem(("lora.adapter_path", "lora.rank"), f"{reason}; set lora.rank, or leave the path empty")
    if not lora.enabled and lora.sync == "adapter":
        reason = "adapter needs adapters, but lora.rank is 0; set lora.rank, or choose merged"
        yield Problem(("lora.sync", "lora.rank"), reason)
    if lora.syncs_adapters and lora.rank > LARGEST_IN_VLLM:
        reason = f"{lora.rank} is above vLLM's limit for adapters, {LARGEST_IN_VLLM}"
        yield Problem(("lora.rank", "lora.sync"), f"{reason}; lower lora.rank, or set lora.sync to merged")
    if lora.dropout and config.model.recompute == "selective" and "mla_up_proj" in config.model.recompute_modules:
        reason = f"{lora.dropout:g}, but model.recompute_modules has mla_up_proj, which would drop other elements"
        yield Problem(("lora.dropout", "model.recompute_modules"), f"{reason}; set lora.dropout to 0, or leave it out")
    storage = config.model.base_storage
    if storage != "none" and not lora.enabled:
        reason = f"{storage} needs frozen weights, but lora.rank is 0; set lora.rank, or choose none"
        yield Problem(("model.base_storage", "lora.rank"), reason)
    if lora.enabled and config.debug.dump_steps and (lora.dropout or storage != "none"):
        key, value = ("model.base_storage", storage) if storage != "none" else ("lora.dropout", f"{lora.dropout:g}")
        reason = f"megagrpo audit cannot recompute a step with {key} {value}; leave dump_steps empty, or change {key}"
        yield Problem(("debug.dump_steps", key), reason)


def _target_problems(lora: LoraSection) -> Iterator[Problem]:
    """Yield target modules that no model has, and layers that select nothing."""
    targets, layers = ("lora.target_modules",), ("lora.layers_to_transform",)
    choice = f"choose {ALL_LINEAR} or a list of {', '.join(PROJECTIONS)}"
    outside = "embeddings and LM head have no adapters"
    if unknown := [name for name in lora.names or [] if name.rpartition(".")[2] not in PROJECTIONS]:
        why = outside if {"lm_head", "embed_tokens"} & set(unknown) else "unknown projection"
        yield Problem(targets, f"{', '.join(unknown)}: {why}; {choice}")
    yield from _expert_problems(lora)
    if lora.names == [] and not lora.target_parameters:
        yield Problem(targets, f"the list is empty, so nothing is trained; {choice}")
    if lora.expression is not None:
        try:
            matched = [name for name in _OUTSIDE if re.fullmatch(lora.expression, name)]
        except re.error as error:
            yield Problem(targets, f"{lora.expression} is no regular expression ({error}); {choice}")
            return
        if matched:
            yield Problem(targets, f"{lora.expression} matches {matched[0]}: {outside}; match projections alone")
        if lora.layers_to_transform is not None:
            said = f"is not supported with a regular expression in lora.target_modules ({lora.expression})"
            yield Problem((*layers, *targets), f"{said}; match the layers there, or list the modules")
    if lora.layers_to_transform == []:
        yield Problem(layers, "the list is empty, so nothing is trained; name layers, or choose null for all")


def _expert_problems(lora: LoraSection) -> Iterator[Problem]:
    """Yield names that no experts have, and options that adapters of experts exclude."""
    key = ("lora.target_parameters",)
    if unknown := [name for name in lora.target_parameters if name.rpartition(".")[2] not in EXPERT_PROJECTIONS]:
        choice = " and ".join(f"experts.{name}" for name in EXPERT_PROJECTIONS)
        yield Problem(key, f"{', '.join(unknown)}: not a parameter of experts; choose among {choice}")
    if lora.target_parameters and lora.dropout:
        said = f"experts have no dropout of adapters, in PEFT too, but lora.dropout is {lora.dropout:g}"
        yield Problem((*key, "lora.dropout"), f"{said}; set it to 0, or leave the list empty")
    if lora.target_parameters and lora.syncs_adapters:
        said = "vLLM applies adapters of experts only with kernels that have not been run here"
        yield Problem(("lora.sync", *key), f"adapter, but {said}; choose merged, or leave the list empty")
