"""Keys and values of config.json from the families' main releases, with their sizes; long lists are generated."""

from __future__ import annotations

from typing import Any

from megagrpo.families.family_index import FAMILIES
from tests.family_examples import EXAMPLES, OTHERS, RELEASES

Raw = dict[str, Any]
ENDS = dict(
    bos_token_id=1, eos_token_id=2, initializer_range=0.02, use_cache=True, hidden_act="silu", attention_dropout=0.0
)


def sizes(hidden: int, layers: int, heads: int, kv_heads: int, mlp: int, vocab: int, **rest: Any) -> Raw:
    """The keys common to all releases, and `rest`."""
    return ENDS | dict(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=mlp,
        vocab_size=vocab,
        torch_dtype="bfloat16",
        transformers_version="4.46.3",
        tie_word_embeddings=False,
        **rest,
    )


def remote(module: str, family: str) -> Raw:
    """`auto_map` of a release that ships code for a class that transformers also has."""
    classes = {
        "AutoConfig": f"configuration_{module}.{family}Config",
        "AutoModelForCausalLM": f"modeling_{module}.{family}ForCausalLM",
    }
    return {"auto_map": classes}


LLAMA3 = dict(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192, rope_type="llama3"
)
DEEPSEEK = remote("deepseek", "DeepseekV2") | dict(
    attention_bias=False,
    aux_loss_alpha=0.001,
    ep_size=1,
    first_k_dense_replace=1,
    kv_lora_rank=512,
    max_position_embeddings=163840,
    moe_intermediate_size=1408,
    moe_layer_freq=1,
    n_routed_experts=64,
    n_shared_experts=2,
    norm_topk_prob=False,
    num_experts_per_tok=6,
    pretraining_tp=1,
    q_lora_rank=None,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    rms_norm_eps=1e-6,
    rope_scaling=dict(
        beta_fast=32,
        beta_slow=1,
        factor=40,
        mscale=0.707,
        mscale_all_dim=0.707,
        original_max_position_embeddings=4096,
        type="yarn",
    ),
    rope_theta=10000,
    routed_scaling_factor=1.0,
    scoring_func="softmax",
    seq_aux=True,
    v_head_dim=128,
    n_group=1,
    topk_group=1,
    topk_method="greedy",
)
ROUTED_BY_BIAS = dict(scoring_func="sigmoid", topk_method="noaux_tc", norm_topk_prob=True, n_group=1, topk_group=1)
KIMI_YARN = dict(beta_fast=1.0, beta_slow=1.0, factor=32.0, mscale=1.0, mscale_all_dim=1.0) | dict(
    original_max_position_embeddings=4096, type="yarn"
)
FP8_BLOCKS = dict(activation_scheme="dynamic", fmt="e4m3", quant_method="fp8", weight_block_size=[128, 128])
QWEN3_MOE = dict(
    attention_bias=False,
    decoder_sparse_step=1,
    head_dim=128,
    max_position_embeddings=40960,
    max_window_layers=48,
    mlp_only_layers=[],
    moe_intermediate_size=768,
    norm_topk_prob=True,
    num_experts=128,
    num_experts_per_tok=8,
    output_router_logits=False,
    rms_norm_eps=1e-6,
    rope_scaling=None,
    rope_theta=1000000.0,
    router_aux_loss_coef=0.001,
    sliding_window=None,
    use_sliding_window=False,
)
GEMMA = dict(
    attention_bias=False,
    cache_implementation="hybrid",
    head_dim=256,
    hidden_activation="gelu_pytorch_tanh",
    query_pre_attn_scalar=256,
    rms_norm_eps=1e-6,
    pad_token_id=0,
)
GLM = dict(
    attention_bias=True, head_dim=128, max_position_embeddings=32768, pad_token_id=151329, partial_rotary_factor=0.5
)
PHI = remote("phi3", "Phi3") | dict(
    attention_bias=False,
    embd_pdrop=0.0,
    resid_pdrop=0.0,
    original_max_position_embeddings=4096,
    pad_token_id=32000,
    rms_norm_eps=1e-5,
)

# Release -> (model_type, class, keys).
PUBLISHED: dict[str, tuple[str, str, Raw]] = {
    "Llama 2 7B": (
        "llama",
        "LlamaForCausalLM",
        sizes(
            4096,
            32,
            32,
            32,
            11008,
            32000,
            max_position_embeddings=4096,
            rms_norm_eps=1e-5,
            pretraining_tp=1,
            rope_scaling=None,
        )
        | dict(_name_or_path="meta-llama/Llama-2-7b-hf", torch_dtype="float16"),
    ),
    "Llama 3.1 8B Instruct": (
        "llama",
        "LlamaForCausalLM",
        sizes(
            4096,
            32,
            32,
            8,
            14336,
            128256,
            max_position_embeddings=131072,
            rms_norm_eps=1e-5,
            rope_theta=500000.0,
            rope_scaling=LLAMA3,
        )
        | dict(attention_bias=False, mlp_bias=False, pretraining_tp=1, eos_token_id=[128001, 128008, 128009]),
    ),
    "SmolLM2 135M Instruct": (
        "llama",
        "LlamaForCausalLM",
        sizes(
            576,
            30,
            9,
            3,
            1536,
            49152,
            max_position_embeddings=8192,
            rms_norm_eps=1e-5,
            rope_theta=100000,
            rope_scaling=None,
        )
        | dict(
            is_llama_config=True,
            rope_interleaved=False,
            pretraining_tp=1,
            tie_word_embeddings=True,
            attention_bias=False,
        )
        | {"transformers.js_config": {"dtype": "q4"}, "mlp_bias": False, "pad_token_id": 2},
    ),
    "Mistral 7B v0.1": (
        "mistral",
        "MistralForCausalLM",
        sizes(
            4096,
            32,
            32,
            8,
            14336,
            32000,
            max_position_embeddings=32768,
            rms_norm_eps=1e-5,
            rope_theta=10000.0,
            sliding_window=4096,
        ),
    ),
    "Mistral Nemo": (
        "mistral",
        "MistralForCausalLM",
        sizes(
            5120,
            40,
            32,
            8,
            14336,
            131072,
            head_dim=128,
            max_position_embeddings=1024000,
            rope_theta=1e6,
            sliding_window=None,
        ),
    ),
    "Mixtral 8x7B": (
        "mixtral",
        "MixtralForCausalLM",
        sizes(
            4096,
            32,
            32,
            8,
            14336,
            32000,
            max_position_embeddings=32768,
            rms_norm_eps=1e-5,
            rope_theta=1e6,
            sliding_window=None,
        )
        | dict(num_experts_per_tok=2, num_local_experts=8, output_router_logits=False, router_aux_loss_coef=0.02),
    ),
    "Qwen2.5 0.5B": (
        "qwen2",
        "Qwen2ForCausalLM",
        sizes(
            896,
            24,
            14,
            2,
            4864,
            151936,
            max_position_embeddings=32768,
            max_window_layers=24,
            rms_norm_eps=1e-6,
            rope_theta=1e6,
        )
        | dict(sliding_window=32768, use_mrope=False, use_sliding_window=False),
    ),
    "Qwen2.5 1.5B, written by transformers 5": (
        "qwen2",
        "Qwen2ForCausalLM",
        sizes(1536, 28, 12, 2, 8960, 151936, max_position_embeddings=131072, max_window_layers=28, rms_norm_eps=1e-6)
        | dict(
            layer_types=["full_attention"] * 28,
            rope_parameters=dict(rope_theta=1e6, rope_type="default"),
            pad_token_id=None,
        )
        | dict(sliding_window=None, use_mrope=False, use_sliding_window=False, dtype="bfloat16", torch_dtype=None),
    ),
    "Qwen3 4B": (
        "qwen3",
        "Qwen3ForCausalLM",
        sizes(
            2560,
            36,
            32,
            8,
            9728,
            151936,
            attention_bias=False,
            head_dim=128,
            max_position_embeddings=40960,
            rms_norm_eps=1e-6,
        )
        | dict(max_window_layers=36, rope_scaling=None, rope_theta=1e6, sliding_window=None, use_sliding_window=False),
    ),
    "Qwen3 30B A3B": ("qwen3_moe", "Qwen3MoeForCausalLM", sizes(2048, 48, 32, 4, 6144, 151936) | QWEN3_MOE),
    "Qwen3 Coder 30B A3B": (
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        sizes(2048, 48, 32, 4, 5472, 151936)
        | QWEN3_MOE
        | dict(qkv_bias=False, shared_expert_intermediate_size=0, use_qk_norm=True),
    ),
    "Gemma 2 9B it": (
        "gemma2",
        "Gemma2ForCausalLM",
        sizes(3584, 42, 16, 8, 14336, 256000, max_position_embeddings=8192, rope_theta=10000.0, sliding_window=4096)
        | GEMMA
        | dict(
            attn_logit_softcapping=50.0,
            final_logit_softcapping=30.0,
            hidden_act="gelu_pytorch_tanh",
            sliding_window_size=4096,
        )
        | dict(tie_word_embeddings=True),
    ),
    "Gemma 3 1B it": (
        "gemma3_text",
        "Gemma3ForCausalLM",
        {
            key: value
            for key, value in sizes(1152, 26, 4, 1, 6912, 262144).items()
            if key not in ("hidden_act", "tie_word_embeddings")
        }
        | GEMMA
        | dict(
            attn_logit_softcapping=None,
            final_logit_softcapping=None,
            max_position_embeddings=32768,
            rope_local_base_freq=10000,
        )
        | dict(
            rope_scaling=None, rope_theta=1000000, sliding_window=512, sliding_window_pattern=6, eos_token_id=[1, 106]
        ),
    ),
    "Gemma 3 270M it": (
        "gemma3_text",
        "Gemma3ForCausalLM",
        {key: value for key, value in sizes(640, 18, 4, 1, 2048, 262144).items() if key != "hidden_act"}
        | {key: value for key, value in GEMMA.items() if key != "cache_implementation"}
        | dict(
            _sliding_window_pattern=6,
            layer_types=(["sliding_attention"] * 5 + ["full_attention"]) * 3,
            sliding_window=512,
        )
        | dict(rope_local_base_freq=10000.0, rope_scaling=None, rope_theta=1000000.0, use_bidirectional_attention=False)
        | dict(attn_logit_softcapping=None, final_logit_softcapping=None, tie_word_embeddings=True),
    ),
    "gpt-oss 20B in bfloat16": (
        "gpt_oss",
        "GptOssForCausalLM",
        sizes(
            2880,
            24,
            64,
            8,
            2880,
            201088,
            attention_bias=True,
            experts_per_token=4,
            head_dim=64,
            initial_context_length=4096,
        )
        | dict(
            layer_types=["sliding_attention", "full_attention"] * 12,
            max_position_embeddings=131072,
            num_experts_per_tok=4,
        )
        | dict(
            num_local_experts=32, output_router_logits=False, pad_token_id=199999, rms_norm_eps=1e-5, rope_theta=150000
        )
        | dict(router_aux_loss_coef=0.9, sliding_window=128, swiglu_limit=7.0)
        | dict(
            rope_scaling=dict(
                beta_fast=32.0,
                beta_slow=1.0,
                factor=32.0,
                original_max_position_embeddings=4096,
                rope_type="yarn",
                truncate=False,
            )
        ),
    ),
    "DeepSeek V2 Lite": ("deepseek_v2", "DeepseekV2ForCausalLM", sizes(2048, 27, 16, 16, 10944, 102400) | DEEPSEEK),
    "DeepSeek V3 in bfloat16": (
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        sizes(7168, 61, 128, 128, 18432, 129280)
        | DEEPSEEK
        | remote("deepseek", "DeepseekV3")
        | dict(first_k_dense_replace=3, moe_intermediate_size=2048, n_group=8, n_routed_experts=256, n_shared_experts=1)
        | dict(
            norm_topk_prob=True,
            num_experts_per_tok=8,
            num_nextn_predict_layers=1,
            q_lora_rank=1536,
            routed_scaling_factor=2.5,
        )
        | dict(scoring_func="sigmoid", topk_group=4, topk_method="noaux_tc"),
    ),
    "Phi 3 mini 4k": (
        "phi3",
        "Phi3ForCausalLM",
        sizes(
            3072,
            32,
            32,
            32,
            8192,
            32064,
            max_position_embeddings=4096,
            rope_scaling=None,
            rope_theta=1e4,
            sliding_window=2047,
        )
        | PHI,
    ),
    "Phi 4 mini": (
        "phi3",
        "Phi3ForCausalLM",
        sizes(3072, 32, 24, 8, 8192, 200064, full_attn_mod=1, interpolate_factor=1, lm_head_bias=False, mlp_bias=False)
        | PHI
        | dict(max_position_embeddings=131072, partial_rotary_factor=0.75, rope_theta=10000.0, sliding_window=262144)
        | dict(
            rope_scaling=dict(long_factor=[1.5] * 48, short_factor=[1.0] * 48, type="longrope"),
            tie_word_embeddings=True,
        )
        | {"auto_map": PHI["auto_map"] | {"AutoTokenizer": "Xenova/gpt-4o"}},
    ),
    "Kimi K2 Instruct": (
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        sizes(7168, 61, 64, 64, 18432, 163840, max_position_embeddings=131072, first_k_dense_replace=1)
        | DEEPSEEK
        | remote("deepseek", "DeepseekV3")
        | ROUTED_BY_BIAS
        | dict(model_type="kimi_k2", n_routed_experts=384, n_shared_experts=1, num_experts_per_tok=8)
        | dict(q_lora_rank=1536, moe_intermediate_size=2048, routed_scaling_factor=2.827, rope_theta=50000.0)
        | dict(rope_scaling=KIMI_YARN, num_nextn_predict_layers=0, quantization_config=FP8_BLOCKS),
    ),
    "Moonlight 16B A3B": (
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        sizes(2048, 27, 16, 16, 11264, 163840)
        | DEEPSEEK
        | remote("deepseek", "DeepseekV3")
        | ROUTED_BY_BIAS
        | dict(max_position_embeddings=8192, routed_scaling_factor=2.446, rope_theta=50000.0, rope_scaling=None)
        | dict(rms_norm_eps=1e-5, num_nextn_predict_layers=0),
    ),
    "GLM 4 9B chat hf": (
        "glm",
        "GlmForCausalLM",
        sizes(4096, 40, 32, 2, 13696, 151552, rms_norm_eps=1.5625e-7, rope_theta=10000.0) | GLM,
    ),
    "GLM 4 9B 0414": (
        "glm4",
        "Glm4ForCausalLM",
        sizes(4096, 40, 32, 2, 13696, 151552, rms_norm_eps=1e-5, rope_theta=10000.0) | GLM,
    ),
}
# Releases in the families' examples.
PUBLISHED |= {
    f"release of {kind}": (kind, family.architecture, RELEASES[kind])
    for kind, family in FAMILIES.items()
    if kind in RELEASES
}
PUBLISHED |= {
    name: (kind, family.architecture, OTHERS[name])
    for kind, family in FAMILIES.items()
    for name in EXAMPLES[kind].others
}


def published(name: str) -> Raw:
    """config.json of a release."""
    kind, cls, keys = PUBLISHED[name]
    return dict(model_type=kind, architectures=[cls]) | keys
