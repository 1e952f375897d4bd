"""GLM-4.7-Flash: the latent attention and the experts of DeepSeek-V3. The layer after the last decoder layer, which
predicts several tokens, is not trained."""

from __future__ import annotations

from megagrpo.models.families import latent
from megagrpo.models.families.deepseek import beyond
from megagrpo.models.families.example import Example
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
    example=Example(
        models="GLM-4.7-Flash",
        differs="latent attention and experts of `deepseek_v3`",
        cases={
            "glm4_moe_lite": latent.TINY_LATENT
            | dict(q_lora_rank=28, num_experts_per_tok=3, n_group=1, topk_group=1, routed_scaling_factor=1.8)
            | dict(norm_topk_prob=True, pad_token_id=0),
            "glm4_moe_lite without latents of queries, groups, yarn": latent.TINY_LATENT
            | latent.TINY_GROUPS
            | dict(q_lora_rank=None, num_experts_per_tok=3, norm_topk_prob=True, pad_token_id=0, rms_norm_eps=1e-5),
        },
        served=latent.SERVED_LATENT,
        drift=1e-5,
        release=dict(
            model_type="glm4_moe_lite",
            architectures=["Glm4MoeLiteForCausalLM"],
            attention_bias=False,
            attention_dropout=0.0,
            dtype="bfloat16",
            eos_token_id=[154820, 154827, 154829],
            first_k_dense_replace=1,
            hidden_act="silu",
            hidden_size=2048,
            intermediate_size=10240,
            kv_lora_rank=512,
            max_position_embeddings=202752,
            moe_intermediate_size=1536,
            n_group=1,
            n_routed_experts=64,
            n_shared_experts=1,
            norm_topk_prob=True,
            num_attention_heads=20,
            num_experts_per_tok=4,
            num_hidden_layers=47,
            num_key_value_heads=20,
            num_nextn_predict_layers=1,
            pad_token_id=154820,
            partial_rotary_factor=1.0,
            q_lora_rank=768,
            qk_nope_head_dim=192,
            qk_rope_head_dim=64,
            rms_norm_eps=1e-05,
            rope_scaling=None,
            rope_theta=1000000,
            routed_scaling_factor=1.8,
            tie_word_embeddings=False,
            topk_group=1,
            topk_method="noaux_tc",
            transformers_version="5.0.0rc0",
            v_head_dim=256,
            vocab_size=154880,
        ),
    ),
)
