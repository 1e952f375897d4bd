"""OLMoE: norms of queries and keys over all heads together, and experts in every block."""

from __future__ import annotations

from dataclasses import replace

from megagrpo.models.families.architecture import HfConfig
from megagrpo.models.families.dense import DENSE, GATE_UP_DOWN, QK_NORM, experts
from megagrpo.models.families.family import EXPERT_KEYS, Family, Raw, expert_problems, mixture
from megagrpo.models.families.qwen3 import HAS_HEAD_NORMS

_TABLE = DENSE | QK_NORM | experts("mlp", *GATE_UP_DOWN)


def _read(raw: Raw, common: HfConfig) -> HfConfig:
    return replace(common, qk_norm=True, wide_qk_norm=True, experts=mixture(raw, normalized=False), norm_eps=1e-5)


FAMILY = Family(
    "olmoe",
    "OlmoeForCausalLM",
    table=lambda hf: _TABLE,
    read=_read,
    problems=expert_problems,
    keys=EXPERT_KEYS,
    fixed=HAS_HEAD_NORMS
    | {
        "clip_qkv": (None, "clipped queries, keys and values are not supported"),
        "tie_word_embeddings": (False, "vLLM's model has an untied LM head"),
        "norm_topk_prob": (False, "vLLM's model does not scale the weights of a token's experts"),
        "rms_norm_eps": (1e-5, "vLLM's model has 1e-5"),
    },
)
