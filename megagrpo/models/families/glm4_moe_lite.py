"""GLM-4.7-Flash: the latent attention and the experts of DeepSeek-V3. The layer after the last decoder layer, which
predicts several tokens, is not trained."""

from __future__ import annotations

from megagrpo.models.families import latent
from megagrpo.models.families.deepseek import beyond
from megagrpo.models.families.family import Family, Raw
from megagrpo.models.families.routed import NORMALIZED, mlp_kind_problems

# transformers reads the list alone, vLLM the number alone
_DENSE = ("mlp_layer_types", "first_k_dense_replace")


def _problems(raw: Raw) -> list[str]:
    return latent.problems(raw) + mlp_kind_problems(raw, default=1)


FAMILY = Family(
    "glm4_moe_lite",
    "Glm4MoeLiteForCausalLM",
    table=latent.table,
    read=lambda raw, common: latent.read(raw, common, normalized=True, sigmoid=True, bias=True),
    problems=_problems,
    # transformers' defaults differ from ours
    required=(*latent.LATENT_REQUIRED, "first_k_dense_replace", "routed_scaling_factor", "rms_norm_eps"),
    keys=(*latent.LATENT_KEYS, *_DENSE, "num_nextn_predict_layers", "num_mtp_layers"),
    fixed=latent.LATENT_FIXED
    | NORMALIZED
    | {
        "topk_method": ("noaux_tc", "only noaux_tc, experts by score and bias, is supported"),
        "scoring_func": ("sigmoid", "only sigmoid is supported"),
        "tie_word_embeddings": (False, "vLLM's model has an untied LM head"),
    },
    untrained=beyond,
    rope_types=("default", "yarn"),
)
