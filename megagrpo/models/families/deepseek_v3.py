"""DeepSeek-V3, R1 and derived models: experts by the sigmoid of the router's logits plus a bias that is not trained.

The layers after the last decoder layer, which predict several tokens at a time, are dropped.
"""

from __future__ import annotations

from megagrpo.models.families import latent
from megagrpo.models.families.architecture import HfConfig
from megagrpo.models.families.family import Family, Raw

_ROUTING = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}  # vLLM reads these keys, transformers does not
# required: transformers' defaults differ from ours
_DEFAULTS = ("first_k_dense_replace", "n_group", "topk_group", "routed_scaling_factor")


def _problems(raw: Raw) -> list[str]:
    lacks = [key for key in _ROUTING if key not in raw]
    lines = [
        f"model: config.json lacks {key}; set it to {_ROUTING[key]}, or vLLM routes tokens another way" for key in lacks
    ]
    return lines + latent.problems(raw)


def _beyond(hf: HfConfig) -> tuple[str, ...]:
    extra = hf.raw.get("num_nextn_predict_layers") or hf.raw.get("num_mtp_layers") or 1
    return tuple(rf"model\.layers\.{hf.num_layers + i}\..+" for i in range(extra))


FAMILY = Family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    table=latent.table,
    read=lambda raw, common: latent.read(raw, common, normalized=True, sigmoid=True, bias=True),
    problems=_problems,
    required=(*latent.LATENT_REQUIRED, *_DEFAULTS),
    keys=(*latent.LATENT_KEYS, "num_nextn_predict_layers", "num_mtp_layers"),
    fixed=latent.LATENT_FIXED
    | {key: (value, f"set it to {value}, the only one that is supported") for key, value in _ROUTING.items()}
    | {
        "norm_topk_prob": (True, "only weights of a token's experts that add up to 1 are supported"),
        "quantization_config": (
            None,
            "quantized weights cannot be trained. If a release has no others, convert them to bfloat16 (for FP8: "
            "inference/fp8_cast_bf16.py of DeepSeek-V3's repository), then remove quantization_config from the copy's "
            "config.json",
        ),
    },
    dropped=_beyond,
)
