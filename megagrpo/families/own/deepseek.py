"""DeepSeek-V2, V3 and V3.2, Kimi K2, and GLM-5: latent attention, and with an indexer sparse attention."""

from __future__ import annotations

from dataclasses import replace

from megagrpo.families.parts import latent
from megagrpo.families.parts.llama_table import ATTENTION
from megagrpo.families.parts.routed import NORMALIZED, beyond, groups, mlp_kind_problems
from megagrpo.families.shared.architecture import HfConfig, Indexer
from megagrpo.families.shared.blocks import same
from megagrpo.families.shared.family import Family, Raw, Table
from megagrpo.families.shared.wrapper import Wrapper


# DeepSeek-V2, V2.5 and V2-Lite: experts by the softmax of the router's logits, from the best groups of experts where
# config.json asks for groups. DeepSeek-V3, R1, Kimi K2 and Moonlight: experts by the sigmoid of the router's logits
# plus a bias that is not trained. Their layers after the last decoder layer, which predict several tokens, are not
# trained.
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

_V3_ROUTING = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}  # vLLM reads these keys, transformers does not


def _v3_problems(raw: Raw) -> list[str]:
    lacks = [key for key in _V3_ROUTING if key not in raw]
    lines = [
        f"config.json lacks {key}; set it to {_V3_ROUTING[key]}, or vLLM routes tokens another way" for key in lacks
    ]
    return lines + latent.problems(raw)


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
DEEPSEEK_V3 = Family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    table=latent.table,
    read=lambda raw, common: latent.read(raw, common, normalized=True, sigmoid=True, bias=True),
    problems=_v3_problems,
    # transformers' defaults differ from ours
    required=(*latent.LATENT_REQUIRED, "first_k_dense_replace", "n_group", "topk_group", "routed_scaling_factor"),
    keys=(*latent.LATENT_KEYS, "num_nextn_predict_layers", "num_mtp_layers"),
    fixed=latent.LATENT_FIXED
    | {key: (value, f"set it to {value}, the only one that is supported") for key, value in _V3_ROUTING.items()}
    | NORMALIZED,
    untrained=beyond,
    aliases=("kimi_k2",),
    wrappers=(_KIMI_K25,),
)

# Shared code of DeepSeek-V3.2 and GLM-5: latent attention and experts of DeepSeek-V3, and an indexer that chooses the
# keys of each token.
_INDEXED_SIZES = ("index_n_heads", "index_head_dim", "index_topk")
_PARTS = ("linear_wq_b.weight", "linear_wk.weight", "k_norm.weight", "k_norm.bias", "linear_weights_proj.weight")
_INDEXED: Table = {
    f"self_attention.core_attention.indexer.{part}": same(f"{ATTENTION}indexer.{part.removeprefix('linear_')}")
    for part in _PARTS
}
_INDEXED_FIXED = DEEPSEEK_V3.fixed | {"tie_word_embeddings": (False, "vLLM's model has an untied LM head")}


def _read_indexed(raw: Raw, common: HfConfig, *, interleaved: bool) -> HfConfig:
    """Return the architecture. The families differ in the rotation of the indexer's queries and keys."""
    heads, head_dim, keys = (raw[key] for key in _INDEXED_SIZES)
    architecture = latent.read(raw, common, normalized=True, sigmoid=True, bias=True)
    return replace(architecture, indexer=Indexer(heads, head_dim, keys, interleaved))


def _indexed_problems(raw: Raw) -> list[str]:
    lines = _v3_problems(raw)
    if raw.get("first_k_dense_replace") is not None:
        lines += mlp_kind_problems(raw, default=raw["first_k_dense_replace"])
    if "q_lora_rank" in raw and raw["q_lora_rank"] is None:
        lines.append("q_lora_rank is null; the indexer reads the latent of the queries")
    width, turned = raw.get("index_head_dim"), raw.get("qk_rope_head_dim")
    if type(width) is int and type(turned) is int and width < turned:
        lines.append(f"index_head_dim={width} is less than qk_rope_head_dim={turned}, whose dimensions are rotated")
    return lines


# DeepSeek-V3.2: DeepSeek-V3 with sparse attention, whose keys a frozen indexer chooses.
DEEPSEEK_V32 = replace(
    DEEPSEEK_V3,
    model_type="deepseek_v32",
    architecture="DeepseekV32ForCausalLM",
    table=lambda hf: latent.table(hf) | _INDEXED,
    read=lambda raw, common: _read_indexed(raw, common, interleaved=False),
    problems=_indexed_problems,
    required=(*DEEPSEEK_V3.required, *_INDEXED_SIZES, "rms_norm_eps"),
    keys=(*DEEPSEEK_V3.keys, *_INDEXED_SIZES, "mlp_layer_types"),
    fixed=_INDEXED_FIXED
    | {"indexer_rope_interleave": (False, "only the rotation of the two halves of the indexer's heads is supported")},
    gpu_only="vLLM has no sparse attention on a CPU",
    rope_types=("default", "yarn"),
    layer_types=("indexed_attention",),
    aliases=(),
    wrappers=(),
)

# GLM-5: latent attention and experts of DeepSeek-V3 with sparse attention, whose keys a frozen indexer chooses.
_KINDS = "indexer_types"


def _glm_moe_dsa_problems(raw: Raw) -> list[str]:
    lines, kinds = _indexed_problems(raw), raw.get(_KINDS)
    if kinds is not None and kinds != ["full"] * raw.get("num_hidden_layers", 0):
        said = f"{_KINDS} does not have 'full' for every block: blocks that share the indexer of another block are not"
        lines.append(f"{said} supported")
    return lines


GLM_MOE_DSA = replace(
    DEEPSEEK_V32,
    model_type="glm_moe_dsa",
    architecture="GlmMoeDsaForCausalLM",
    read=lambda raw, common: _read_indexed(raw, common, interleaved=True),
    problems=_glm_moe_dsa_problems,
    keys=(*DEEPSEEK_V32.keys, _KINDS),
    fixed=_INDEXED_FIXED
    | {
        "indexer_rope_interleave": (True, "only the rotation of neighbouring dimensions of the indexer is supported"),
        "index_topk_freq": (1, "blocks that share the indexer of another block are not supported"),
        "index_topk_pattern": (None, "blocks that share the indexer of another block are not supported"),
    },
)
