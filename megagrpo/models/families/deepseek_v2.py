"""DeepSeek-V2, V2.5 and V2-Lite: experts by the softmax of the router's logits, from the best groups of experts where
config.json asks for groups."""

from __future__ import annotations

from megagrpo.models.families import latent
from megagrpo.models.families.family import Family, Raw


def _problems(raw: Raw) -> list[str]:
    method = raw.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        return [f"model: topk_method is {method!r}; supported: greedy, group_limited_greedy"]
    if method == "greedy" and latent.groups(raw)[0] > 1:
        return [
            f"model: n_group={raw['n_group']} with topk_method greedy, which vLLM does not read; set one to 1 or "
            "group_limited_greedy"
        ]
    return latent.problems(raw)


FAMILY = Family(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    table=latent.table,
    read=lambda raw, common: latent.read(raw, common, normalized=False),
    problems=_problems,
    required=latent.LATENT_REQUIRED,
    keys=(*latent.LATENT_KEYS, "topk_method"),
    fixed=latent.LATENT_FIXED
    | {
        "scoring_func": ("softmax", "only softmax is supported"),
        "norm_topk_prob": (False, "transformers does not scale the weights of a token's experts; set it to false"),
    },
)
