"""Mistral: a Llama whose attention may have a window, of 4096 tokens if config.json does not set one. Mixtral: a
Mistral with a mixture of experts in every block; the weights of a token's experts always sum to 1."""

from __future__ import annotations

from dataclasses import replace

from megagrpo.models.families.architecture import HfConfig
from megagrpo.models.families.dense import DENSE, experts
from megagrpo.models.families.family import EXPERT_KEYS, Family, Raw, expert_problems, mixture, rope, windows
from megagrpo.models.families.image_models import MISTRAL_SIZES, around
from megagrpo.models.families.wrapper import Wrapper

MISTRAL3 = Wrapper("mistral3", "Mistral3ForConditionalGeneration")  # around Mistral Small 3.1 and 3.2, and Ministral 3
MISTRAL = Family(
    "mistral",
    "MistralForCausalLM",
    table=lambda hf: DENSE,
    read=lambda raw, common: replace(common, windows=windows(raw, raw.get("sliding_window", 4096))),
    keys=("sliding_window",),
    wrappers=(MISTRAL3, *around(MISTRAL_SIZES, "llava", "llava_next")),
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
)
