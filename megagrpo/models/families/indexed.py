"""Shared code of DeepSeek-V3.2 and GLM-5: latent attention and experts of DeepSeek-V3, and an indexer that chooses the
keys of each token. Imports no torch."""

from __future__ import annotations

from dataclasses import replace

from megagrpo.models.families import latent
from megagrpo.models.families.architecture import HfConfig, Indexer
from megagrpo.models.families.blocks import same
from megagrpo.models.families.deepseek import V3_DEFAULTS, V3_FIXED, V3_KEYS, v3_problems
from megagrpo.models.families.dense import ATTENTION
from megagrpo.models.families.family import Raw, Table
from megagrpo.models.families.routed import mlp_kind_problems

_SIZES = ("index_n_heads", "index_head_dim", "index_topk")
_PARTS = ("linear_wq_b.weight", "linear_wk.weight", "k_norm.weight", "k_norm.bias", "linear_weights_proj.weight")
INDEXED: Table = {
    f"self_attention.core_attention.indexer.{part}": same(f"{ATTENTION}indexer.{part.removeprefix('linear_')}")
    for part in _PARTS
}
INDEXED_REQUIRED = (*latent.LATENT_REQUIRED, *V3_DEFAULTS, *_SIZES, "rms_norm_eps")
INDEXED_KEYS = (*V3_KEYS, *_SIZES, "mlp_layer_types")
INDEXED_LAYERS = ("indexed_attention",)  # in config.json's layer_types
INDEXED_FIXED = V3_FIXED | {"tie_word_embeddings": (False, "vLLM's model has an untied LM head")}
GPU_ONLY = "vLLM has no sparse attention on a CPU"


def table(hf: HfConfig) -> Table:
    """Return the table of a model that `read` describes."""
    return latent.table(hf) | INDEXED


def read(raw: Raw, common: HfConfig, *, interleaved: bool) -> HfConfig:
    """Return the architecture. The families differ in the rotation of the indexer's queries and keys."""
    heads, head_dim, keys = (raw[key] for key in _SIZES)
    architecture = latent.read(raw, common, normalized=True, sigmoid=True, bias=True)
    return replace(architecture, indexer=Indexer(heads, head_dim, keys, interleaved))


def problems(raw: Raw) -> list[str]:
    """Return why the model cannot be trained."""
    lines = v3_problems(raw)
    if raw.get("first_k_dense_replace") is not None:
        lines += mlp_kind_problems(raw, default=raw["first_k_dense_replace"])
    if "q_lora_rank" in raw and raw["q_lora_rank"] is None:
        lines.append("q_lora_rank is null; the indexer reads the latent of the queries")
    width, turned = raw.get("index_head_dim"), raw.get("qk_rope_head_dim")
    if type(width) is int and type(turned) is int and width < turned:
        lines.append(f"index_head_dim={width} is less than qk_rope_head_dim={turned}, whose dimensions are rotated")
    return lines
