"""DeepSeek-V3.2: DeepSeek-V3 with sparse attention, whose keys a frozen indexer chooses."""

from __future__ import annotations

from megagrpo.models.families import indexed
from megagrpo.models.families.deepseek import V3_ROUTING, beyond
from megagrpo.models.families.example import YARN, Example
from megagrpo.models.families.family import Family, Raw

_CASES: dict[str, Raw] = {
    "deepseek_v32": indexed.TINY_INDEXED | dict(n_group=4, topk_group=2, routed_scaling_factor=2.0),
    "deepseek_v32 yarn, more keys": indexed.TINY_INDEXED
    | dict(n_group=1, topk_group=1, index_topk=16, rope_parameters=YARN | dict(mscale=0.9, mscale_all_dim=0.7)),
}
FAMILY = Family(
    "deepseek_v32",
    "DeepseekV32ForCausalLM",
    table=indexed.table,
    read=lambda raw, common: indexed.read(raw, common, interleaved=False),
    problems=indexed.problems,
    required=indexed.INDEXED_REQUIRED,
    keys=indexed.INDEXED_KEYS,
    fixed=indexed.INDEXED_FIXED
    | {"indexer_rope_interleave": (False, "only the rotation of the two halves of the indexer's heads is supported")},
    untrained=beyond,
    gpu_only=indexed.GPU_ONLY,
    rope_types=("default", "yarn"),
    layer_types=indexed.INDEXED_LAYERS,
    example=Example(
        models="DeepSeek-V3.2, V3.2-Exp",
        differs="as `deepseek_v3`, sparse attention, whose keys an indexer chooses",
        cases=_CASES,
        unserved=dict.fromkeys(_CASES, indexed.NO_CPU),
        release=V3_ROUTING
        | dict(
            model_type="deepseek_v32",
            architectures=["DeepseekV32ForCausalLM"],
            attention_bias=False,
            attention_dropout=0.0,
            bos_token_id=0,
            eos_token_id=1,
            ep_size=1,
            first_k_dense_replace=3,
            hidden_act="silu",
            hidden_size=7168,
            index_head_dim=128,
            index_n_heads=64,
            index_topk=2048,
            initializer_range=0.02,
            intermediate_size=18432,
            kv_lora_rank=512,
            max_position_embeddings=163840,
            moe_intermediate_size=2048,
            moe_layer_freq=1,
            n_group=8,
            n_routed_experts=256,
            n_shared_experts=1,
            norm_topk_prob=True,
            num_attention_heads=128,
            num_experts_per_tok=8,
            num_hidden_layers=61,
            num_key_value_heads=128,
            num_nextn_predict_layers=1,
            q_lora_rank=1536,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            quantization_config=dict(
                activation_scheme="dynamic",
                fmt="e4m3",
                quant_method="fp8",
                scale_fmt="ue8m0",
                weight_block_size=[128, 128],
            ),
            rms_norm_eps=1e-06,
            rope_scaling=dict(
                beta_fast=32,
                beta_slow=1,
                factor=40,
                mscale=1.0,
                mscale_all_dim=1.0,
                original_max_position_embeddings=4096,
                type="yarn",
            ),
            rope_theta=10000,
            routed_scaling_factor=2.5,
            tie_word_embeddings=False,
            topk_group=4,
            torch_dtype="bfloat16",
            transformers_version="4.44.2",
            use_cache=True,
            v_head_dim=128,
            vocab_size=129280,
        ),
    ),
)
