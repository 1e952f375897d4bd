"""Mistral: a Llama whose attention may have a window, of 4096 tokens if config.json does not set one. Mixtral: a
Mistral with a mixture of experts in every block; the weights of a token's experts always sum to 1."""

from __future__ import annotations

from dataclasses import replace

from megagrpo.models.families.architecture import HfConfig
from megagrpo.models.families.dense import DENSE, experts
from megagrpo.models.families.example import TINY_SIGLIP, Example
from megagrpo.models.families.family import EXPERT_KEYS, Family, Raw, expert_problems, mixture, rope, windows
from megagrpo.models.families.image_models import MISTRAL_SIZES, around
from megagrpo.models.families.wrapper import Wrapper

MISTRAL3 = Wrapper("mistral3", "Mistral3ForConditionalGeneration")  # around Mistral Small 3.1 and 3.2, and Ministral 3
_TINY_PIXTRAL: Raw = dict(model_type="pixtral", hidden_size=32, head_dim=8, intermediate_size=48, num_hidden_layers=2)
_TINY_PIXTRAL |= dict(num_attention_heads=4, image_size=32, patch_size=8)
WRAPPED = {"mistral3": dict(vision_config=_TINY_PIXTRAL, image_token_index=126, tie_word_embeddings=False)}
MISTRAL = Family(
    "mistral",
    "MistralForCausalLM",
    table=lambda hf: DENSE,
    read=lambda raw, common: replace(common, windows=windows(raw, raw.get("sliding_window", 4096))),
    keys=("sliding_window",),
    wrappers=(MISTRAL3, *around(MISTRAL_SIZES, "llava", "llava_next")),
    example=Example(
        models="Mistral 7B, Nemo, Small",
        differs="window",
        cases={
            "mistral": dict(sliding_window=None, head_dim=16),
            "mistral window": dict(sliding_window=7, head_dim=16),
        },
        wrapped={"llava_next": dict(vision_config=TINY_SIGLIP, image_token_index=126, image_grid_pinpoints=[[32, 64]])},
    ),
)


_MIXTRAL_TABLE = DENSE | experts("block_sparse_moe", "w1", "w3", "w2")


def _mixtral(raw: Raw, common: HfConfig) -> HfConfig:
    # transformers has other defaults for this family than for Llama.
    norm_eps, theta = raw.get("rms_norm_eps", 1e-5), rope({"rope_theta": 1e6} | raw)["rope_theta"]
    return replace(
        common,
        norm_eps=norm_eps,
        rope_theta=theta,
        experts=mixture(raw),
        windows=windows(raw, raw.get("sliding_window")),
    )


MIXTRAL = Family(
    "mixtral",
    "MixtralForCausalLM",
    table=lambda hf: _MIXTRAL_TABLE,
    read=_mixtral,
    problems=expert_problems,
    keys=("sliding_window", *EXPERT_KEYS),
    example=Example(
        models="Mixtral",
        differs="experts, window",
        cases={"mixtral": dict(num_local_experts=4, num_experts_per_tok=2)},
        served=dict(intermediate_size=96),
    ),
)
