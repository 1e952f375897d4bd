"""DeepSeek-V2, V2.5 and V2-Lite: experts by the softmax of the router's logits, from the best groups of experts where
config.json asks for groups. DeepSeek-V3, R1, Kimi K2 and Moonlight: experts by the sigmoid of the router's logits plus
a bias that is not trained. Their layers after the last decoder layer, which predict several tokens, are not trained."""

from __future__ import annotations

from megagrpo.models.families import latent
from megagrpo.models.families.architecture import HfConfig
from megagrpo.models.families.family import Family, Raw
from megagrpo.models.families.routed import NORMALIZED, groups
from megagrpo.models.families.wrapper import Wrapper


def _v2_problems(raw: Raw) -> list[str]:
    method = raw.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        return [f"topk_method is {method!r}; supported: greedy, group_limited_greedy"]
    if method == "greedy" and groups(raw)[0] > 1:
        return [
            f"n_group={raw['n_group']} with topk_method greedy, which vLLM does not read; set one to 1 or "
            "group_limited_greedy"
        ]
    return latent.problems(raw)


DEEPSEEK_V2 = Family(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    table=latent.table,
    read=lambda raw, common: latent.read(raw, common, normalized=False),
    problems=_v2_problems,
    required=latent.LATENT_REQUIRED,
    keys=(*latent.LATENT_KEYS, "topk_method"),
    fixed=latent.LATENT_FIXED
    | {
        "scoring_func": ("softmax", "only softmax is supported"),
        "norm_topk_prob": (False, "transformers does not scale the weights of a token's experts; set it to false"),
    },
)


V3_ROUTING = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}  # vLLM reads these keys, transformers does not
# required: transformers' defaults differ from ours
V3_DEFAULTS = ("first_k_dense_replace", "n_group", "topk_group", "routed_scaling_factor")


def v3_problems(raw: Raw) -> list[str]:
    """Return why a model with the experts of DeepSeek-V3 cannot be trained."""
    lacks = [key for key in V3_ROUTING if key not in raw]
    lines = [
        f"config.json lacks {key}; set it to {V3_ROUTING[key]}, or vLLM routes tokens another way" for key in lacks
    ]
    return lines + latent.problems(raw)


def beyond(hf: HfConfig) -> tuple[str, ...]:
    """Return patterns of the tensors of layers after the last block, which predict further tokens."""
    extra = hf.raw.get("num_nextn_predict_layers") or hf.raw.get("num_mtp_layers") or 1
    return tuple(rf"model\.layers\.{hf.num_layers + i}\..+" for i in range(extra))


_KIMI_K25 = Wrapper(
    "kimi_k25",
    "KimiK25ForConditionalGeneration",
    texts=("kimi_k2", "deepseek_v3"),
    ignored=(
        *("media_placeholder_token_id", "use_unified_vision_chunk", "video_placeholder", "ignore_index"),
        *("projection_hidden_size", "projection_layer_norm_eps"),
    ),
    untrained=(r"(model\.)?mm_projector\..+",),
)
V3_KEYS = (*latent.LATENT_KEYS, "num_nextn_predict_layers", "num_mtp_layers")
V3_FIXED = (
    latent.LATENT_FIXED
    | {key: (value, f"set it to {value}, the only one that is supported") for key, value in V3_ROUTING.items()}
    | NORMALIZED
)
DEEPSEEK_V3 = Family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    table=latent.table,
    read=lambda raw, common: latent.read(raw, common, normalized=True, sigmoid=True, bias=True),
    problems=v3_problems,
    required=(*latent.LATENT_REQUIRED, *V3_DEFAULTS),
    keys=V3_KEYS,
    fixed=V3_FIXED,
    untrained=beyond,
    aliases=("kimi_k2",),
    wrappers=(_KIMI_K25,),
)
