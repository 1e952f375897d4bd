"""GLM-5: latent attention and experts of DeepSeek-V3 with sparse attention, whose keys a frozen indexer chooses."""

from __future__ import annotations

from megagrpo.models.families import indexed
from megagrpo.models.families.deepseek import V3_ROUTING, beyond
from megagrpo.models.families.example import Example
from megagrpo.models.families.family import Family, Raw

_KINDS = "indexer_types"


def _problems(raw: Raw) -> list[str]:
    lines, kinds = indexed.problems(raw), raw.get(_KINDS)
    if kinds is not None and kinds != ["full"] * raw.get("num_hidden_layers", 0):
        said = f"{_KINDS} does not have 'full' for every block: blocks that share the indexer of another block are not"
        lines.append(f"{said} supported")
    return lines


_CASES: dict[str, Raw] = {
    "glm_moe_dsa": indexed.TINY_INDEXED
    | dict(n_group=1, topk_group=1, routed_scaling_factor=2.5, indexer_rope_interleave=True)
}
FAMILY = Family(
    "glm_moe_dsa",
    "GlmMoeDsaForCausalLM",
    table=indexed.table,
    read=lambda raw, common: indexed.read(raw, common, interleaved=True),
    problems=_problems,
    required=indexed.INDEXED_REQUIRED,
    keys=(*indexed.INDEXED_KEYS, _KINDS),
    fixed=indexed.INDEXED_FIXED
    | {
        "indexer_rope_interleave": (True, "only the rotation of neighbouring dimensions of the indexer is supported"),
        "index_topk_freq": (1, "blocks that share the indexer of another block are not supported"),
        "index_topk_pattern": (None, "blocks that share the indexer of another block are not supported"),
    },
    untrained=beyond,
    gpu_only=indexed.GPU_ONLY,
    rope_types=("default", "yarn"),
    layer_types=indexed.INDEXED_LAYERS,
    example=Example(
        models="GLM-5, 5.1",
        differs="as `deepseek_v32`, the indexer rotates neighbouring dimensions",
        cases=_CASES,
        unserved=dict.fromkeys(_CASES, indexed.NO_CPU),
        release=V3_ROUTING
        | dict(
            model_type="glm_moe_dsa",
            architectures=["GlmMoeDsaForCausalLM"],
            attention_bias=False,
            attention_dropout=0.0,
            dtype="bfloat16",
            eos_token_id=[154820, 154827, 154829],
            ep_size=1,
            first_k_dense_replace=3,
            head_dim=64,
            hidden_act="silu",
            hidden_size=6144,
            index_head_dim=128,
            index_n_heads=32,
            index_topk=2048,
            indexer_rope_interleave=True,
            initializer_range=0.02,
            intermediate_size=12288,
            kv_lora_rank=512,
            max_position_embeddings=202752,
            moe_intermediate_size=2048,
            moe_layer_freq=1,
            n_group=1,
            n_routed_experts=256,
            n_shared_experts=1,
            norm_topk_prob=True,
            num_attention_heads=64,
            num_experts_per_tok=8,
            num_hidden_layers=78,
            num_key_value_heads=64,
            num_nextn_predict_layers=1,
            pad_token_id=154820,
            q_lora_rank=2048,
            qk_head_dim=256,
            qk_nope_head_dim=192,
            qk_rope_head_dim=64,
            rms_norm_eps=1e-05,
            rope_interleave=True,
            rope_parameters=dict(rope_theta=1000000, rope_type="default"),
            routed_scaling_factor=2.5,
            tie_word_embeddings=False,
            topk_group=1,
            transformers_version="5.0.2.dev0",
            use_cache=True,
            v_head_dim=256,
            vocab_size=154880,
        ),
    ),
)
