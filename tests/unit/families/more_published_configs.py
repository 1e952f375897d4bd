"""config.json of published models that no family lists as its release: multimodal, quantized, of other names or classes.

    python -m tests.unit.families.more_published_configs

prints every release that is known here, those of `published_configs.py` included, and whether it loads or why not.
Keys of towers, which no text model reads, are left out; so are keys beyond the class of models without a family.
"""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import Any

from megagrpo.families.config_keys import architecture_problems
from megagrpo.families.family_index import FAMILIES
from tests.unit.families.published_configs import LLAMA3, PUBLISHED, Raw, published, sizes

FULL, LINEAR = "full_attention", "linear_attention"
BF16 = dict(dtype="bfloat16", transformers_version="4.57.1")
QWEN_IMAGES = dict(
    image_token_id=151655, video_token_id=151656, vision_start_token_id=151652, vision_end_token_id=151653
)


def text(kind: str, *shape: int, **rest: Any) -> Raw:
    """A `text_config`."""
    own = sizes(*shape) | rest
    return {key: value for key, value in own.items() if key not in ("transformers_version", "torch_dtype")} | dict(
        model_type=kind
    )


def whole(kind: str, cls: str, inner: Raw, **rest: Any) -> Raw:
    """A multimodal config.json."""
    return dict(model_type=kind, architectures=[cls], text_config=inner, vision_config={"hidden_size": 1152}) | rest


def gemma3(*shape: int, **rest: Any) -> Raw:
    keys = dict(zip(("hidden_size", "num_hidden_layers", "intermediate_size"), shape, strict=True))
    inner = keys | dict(
        model_type="gemma3_text", rope_scaling=dict(factor=8.0, rope_type="linear"), sliding_window=1024
    )
    ids = dict(boi_token_index=255999, eoi_token_index=256000, eos_token_id=[1, 106], image_token_index=262144)
    head = dict(initializer_range=0.02, mm_tokens_per_image=256, torch_dtype="bfloat16", transformers_version="4.50.0")
    tower = dict(hidden_size=1152, image_size=896, intermediate_size=4304, num_attention_heads=16, patch_size=14)
    tower |= dict(model_type="siglip_vision_model", num_hidden_layers=27, vision_use_head=False)
    return whole("gemma3", "Gemma3ForConditionalGeneration", inner | rest, **ids, **head, vision_config=tower)


def qwen3_vl(kind: str, cls: str, inner: Raw) -> Raw:
    rotary = dict(rope_scaling=dict(mrope_interleaved=True, mrope_section=[24, 20, 20], rope_type="default"))
    rotary |= dict(
        rope_theta=5000000, head_dim=128, rms_norm_eps=1e-6, max_position_embeddings=262144, dtype="bfloat16"
    )
    inner = {key: value for key, value in inner.items() if key != "tie_word_embeddings"} | rotary
    inner |= dict(attention_bias=False, model_type=f"{kind}_text")
    return whole(kind, cls, inner, tie_word_embeddings=False, transformers_version="4.57.0.dev0", **QWEN_IMAGES)


def qwen3_5(kind: str, cls: str, layers: int, inner: Raw) -> Raw:
    inner |= dict(
        attn_output_gate=True,
        attention_bias=False,
        full_attention_interval=4,
        head_dim=256,
        layer_types=[FULL if (i + 1) % 4 == 0 else LINEAR for i in range(layers)],
        linear_conv_kernel_dim=4,
        linear_key_head_dim=128,
        linear_num_key_heads=16,
        linear_value_head_dim=128,
        max_position_embeddings=262144,
        mlp_only_layers=[],
        mtp_num_hidden_layers=1,
        mtp_use_dedicated_embeddings=False,
        mamba_ssm_dtype="float32",
        rms_norm_eps=1e-6,
        rope_parameters=dict(mrope_interleaved=True, mrope_section=[11, 11, 10], rope_type="default")
        | dict(rope_theta=10000000, partial_rotary_factor=0.25),
        dtype="bfloat16",
        eos_token_id=248044,
    )
    inner.pop("tie_word_embeddings")
    ids = dict(image_token_id=248056, video_token_id=248057, vision_start_token_id=248053, vision_end_token_id=248054)
    return whole(kind, cls, inner, tie_word_embeddings=False, transformers_version="4.57.0.dev0", **ids)


PIXTRAL = dict(image_token_index=10, multimodal_projector_bias=False, projector_hidden_act="gelu", spatial_merge_size=2)
MISTRAL_3 = PIXTRAL | dict(vision_feature_layer=-1)
FP8 = dict(
    quantization_config=dict(quant_method="fp8", fmt="e4m3", weight_block_size=[128, 128], activation_scheme="dynamic")
)
INT4_WEIGHTS = dict(num_bits=4, type="int", symmetric=True, strategy="group", group_size=32)
INT4 = dict(quant_method="compressed-tensors", format="pack-quantized", ignore=["lm_head", "re:.*self_attn.*"])
INT4 |= dict(config_groups={"group_0": dict(targets=["Linear"], weights=INT4_WEIGHTS)})
DEEPSEEK_V3 = PUBLISHED["DeepSeek V3 in bfloat16"][2]
YARN_2512 = dict(beta_fast=32.0, beta_slow=1.0, factor=16.0, llama_4_scaling_beta=0.1, mscale=1.0, mscale_all_dim=1.0)
YARN_2512 |= dict(original_max_position_embeddings=16384, rope_theta=1000000.0, rope_type="yarn", type="yarn")
MINISTRAL = text("ministral3", 4096, 34, 32, 8, 14336, 131072, head_dim=128, max_position_embeddings=262144)
MINISTRAL |= dict(rope_parameters=YARN_2512, rms_norm_eps=1e-5, sliding_window=None)
LLAMA4 = text("llama4_text", 5120, 48, 40, 8, 8192, 202048, head_dim=128, max_position_embeddings=10485760)
LLAMA4 |= dict(
    attention_bias=False,
    attention_chunk_size=8192,
    attn_scale=0.1,
    attn_temperature_tuning=True,
    cache_implementation="hybrid",
    floor_scale=8192,
    for_llm_compressor=False,
    interleave_moe_layer_step=1,
    intermediate_size_mlp=16384,
    moe_layers=list(range(48)),
    no_rope_layers=[int((i + 1) % 4 != 0) for i in range(48)],
    num_experts_per_tok=1,
    num_local_experts=16,
    output_router_logits=False,
    pad_token_id=200018,
    rms_norm_eps=1e-5,
    rope_scaling=LLAMA3 | dict(factor=16.0, high_freq_factor=1.0),
    rope_theta=500000.0,
    router_aux_loss_coef=0.001,
    router_jitter_noise=0.0,
    torch_dtype="bfloat16",
    use_qk_norm=True,
)
EXPERTS_80B = dict(
    decoder_sparse_step=1, mlp_only_layers=[], norm_topk_prob=True, num_experts=128, num_experts_per_tok=8
)
GEMMA3_27B = dict(head_dim=128, query_pre_attn_scalar=168)
# Name of a release -> config.json.
GEMMA4 = published("release of gemma4_text")
GEMMA4_IDS = dict(boa_token_id=256000, boi_token_id=255999, eoa_token_index=258883, eoi_token_id=258882)
GEMMA4_IDS |= dict(
    audio_token_id=258881, image_token_id=258880, video_token_id=258884, vision_soft_tokens_per_image=280
)
GLM_IDS = {
    f"{kind}_{end}_token_id": 151339 + i for i, (kind, end) in enumerate(product(("image", "video"), ("start", "end")))
}
GLM_OWN = ("architectures", "num_nextn_predict_layers", "tie_word_embeddings", "transformers_version")
MORE: dict[str, Raw] = {
    "GLM 4.1V 9B Thinking": sizes(4096, 40, 32, 2, 13696, 151552, max_position_embeddings=65536)
    | dict(model_type="glm4v", architectures=["Glm4vForConditionalGeneration"], vision_config={"hidden_size": 1536})
    | dict(attention_bias=True, attention_dropout=0.0, partial_rotary_factor=0.5, pad_token_id=151329)
    | dict(eos_token_id=[151329, 151336, 151338, 151348], rms_norm_eps=1e-5, tie_word_embeddings=False)
    | dict(**GLM_IDS, image_token_id=151343, video_token_id=151344, rope_theta=10000.0)
    | dict(rope_scaling=dict(type="default", mrope_section=[8, 12, 12])),
    "GLM 4.5V": whole(
        "glm4v_moe",
        "Glm4vMoeForConditionalGeneration",
        {key: value for key, value in published("release of glm4_moe").items() if key not in GLM_OWN}
        | dict(model_type="glm4v_moe_text", max_position_embeddings=65536, rope_theta=10000.0)
        | dict(rope_scaling=dict(rope_type="default", mrope_section=[8, 12, 12])),
        **GLM_IDS,
        image_token_id=151363,
        video_token_id=151364,
        tie_word_embeddings=False,
    ),
    "Gemma 3 4B it": gemma3(2560, 34, 10240),
    "Gemma 3 12B it": gemma3(3840, 48, 15360, num_attention_heads=16, num_key_value_heads=8),
    "Gemma 3 27B it": gemma3(5376, 62, 21504, num_attention_heads=32, num_key_value_heads=16, **GEMMA3_27B),
    "Qwen2.5-VL 7B": sizes(3584, 28, 28, 4, 18944, 152064, max_position_embeddings=128000, max_window_layers=28)
    | dict(model_type="qwen2_5_vl", architectures=["Qwen2_5_VLForConditionalGeneration"], vision_token_id=151654)
    | dict(rms_norm_eps=1e-6, rope_theta=1000000.0, sliding_window=32768, use_sliding_window=False, vision_config={})
    | dict(rope_scaling=dict(type="mrope", mrope_section=[16, 24, 24]))
    | QWEN_IMAGES,
    "Qwen2-VL 7B": sizes(3584, 28, 28, 4, 18944, 152064, max_position_embeddings=32768, max_window_layers=28)
    | dict(model_type="qwen2_vl", architectures=["Qwen2VLForConditionalGeneration"], vision_token_id=151654)
    | dict(rms_norm_eps=1e-6, rope_theta=1000000.0, sliding_window=32768, use_sliding_window=False, vision_config={})
    | dict(rope_scaling=dict(type="mrope", mrope_section=[16, 24, 24]))
    | QWEN_IMAGES,
    "Qwen3-VL 8B": qwen3_vl("qwen3_vl", "Qwen3VLForConditionalGeneration", text("", 4096, 36, 32, 8, 12288, 151936)),
    "Qwen3-VL 30B A3B": qwen3_vl(
        "qwen3_vl_moe",
        "Qwen3VLMoeForConditionalGeneration",
        text("", 2048, 48, 32, 4, 6144, 151936, moe_intermediate_size=768, **EXPERTS_80B),
    ),
    "Qwen3.5 27B": qwen3_5(
        "qwen3_5",
        "Qwen3_5ForConditionalGeneration",
        64,
        text("qwen3_5_text", 5120, 64, 24, 4, 17408, 248320, linear_num_value_heads=48),
    ),
    "Qwen3.5 35B A3B": qwen3_5(
        "qwen3_5_moe",
        "Qwen3_5MoeForConditionalGeneration",
        40,
        text("qwen3_5_moe_text", 2048, 40, 16, 2, 512, 248320, linear_num_value_heads=32, num_experts=256)
        | dict(num_experts_per_tok=8, moe_intermediate_size=512, shared_expert_intermediate_size=512)
        | dict(output_router_logits=False, router_aux_loss_coef=0.001),
    ),
    "Mistral Small 3.1 24B": whole(
        "mistral3",
        "Mistral3ForConditionalGeneration",
        text("mistral", 5120, 40, 32, 8, 32768, 131072, head_dim=128, max_position_embeddings=131072)
        | dict(rms_norm_eps=1e-5, rope_theta=1000000000.0, sliding_window=None),
        torch_dtype="bfloat16",
        transformers_version="4.50.0.dev0",
        **MISTRAL_3,
    ),
    "Ministral 3 8B Base": whole("mistral3", "Mistral3ForConditionalGeneration", MINISTRAL, **BF16, **MISTRAL_3),
    "Ministral 3 8B text": MINISTRAL | dict(architectures=["Ministral3ForCausalLM"]) | BF16,
    "Llama 4 Scout": whole(
        "llama4",
        "Llama4ForConditionalGeneration",
        LLAMA4,
        boi_token_index=200080,
        eoi_token_index=200081,
        image_token_index=200092,
        tie_word_embeddings=False,
        torch_dtype="bfloat16",
        transformers_version="4.51.0.dev0",
    ),
    "Gemma 4 31B it": whole("gemma4", "Gemma4ForConditionalGeneration", GEMMA4, **GEMMA4_IDS),
    **{
        f"{name} it": whole("gemma4", "Gemma4ForConditionalGeneration", published(name), **GEMMA4_IDS)
        for name in ("Gemma 4 E2B", "Gemma 4 E4B", "Gemma 4 26B-A4B")
    },
    "Granite 4.0 Micro": published("release of granitemoehybrid")
    | dict(hidden_size=2560, num_attention_heads=40, logits_scaling=10, layer_types=["attention"] * 40)
    | dict(mamba_n_heads=80, mamba_d_state=256, position_embedding_type="rope", rope_theta=10000000),
    "Granite 4.0 H Tiny": published("release of granitemoehybrid")
    | dict(hidden_size=1536, num_attention_heads=12, num_key_value_heads=4, mamba_n_heads=48, logits_scaling=6)
    | dict(num_local_experts=64, num_experts_per_tok=6, intermediate_size=512, shared_intermediate_size=1024),
    "Nemotron Nano 9B v2": {
        key: value for key, value in published("release of nemotron_h").items() if "expert" not in key
    }
    | dict(hybrid_override_pattern="M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-", num_hidden_layers=56)
    | dict(hidden_size=4480, num_attention_heads=40, num_key_value_heads=8, intermediate_size=15680)
    | dict(mamba_num_heads=128, mamba_head_dim=80, rms_norm_eps=1e-5, time_step_limit=[0.0, float("inf")]),
    "Nemotron H 8B": {key: value for key, value in published("release of nemotron_h").items() if "expert" not in key}
    | dict(hybrid_override_pattern="M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-", num_hidden_layers=52)
    | dict(hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, intermediate_size=21504)
    | dict(mamba_num_heads=128, mamba_head_dim=64),
    "Kimi K2": DEEPSEEK_V3
    | dict(model_type="kimi_k2", architectures=["DeepseekV3ForCausalLM"], num_attention_heads=64, num_hidden_layers=61)
    | dict(num_key_value_heads=64)
    | dict(n_routed_experts=384, n_group=1, topk_group=1, first_k_dense_replace=1, routed_scaling_factor=2.827)
    | dict(vocab_size=163840, rope_theta=50000.0)
    | FP8,
    "Moonlight 16B A3B": DEEPSEEK_V3
    | dict(model_type="deepseek_v3", architectures=["DeepseekV3ForCausalLM"], hidden_size=2048, num_hidden_layers=27)
    | dict(q_lora_rank=None, num_attention_heads=16, num_key_value_heads=16, n_routed_experts=64, n_group=1)
    | dict(topk_group=1, num_experts_per_tok=6, moe_intermediate_size=1408, intermediate_size=11264, rope_scaling=None)
    | dict(vocab_size=163840, n_shared_experts=2, first_k_dense_replace=1, num_nextn_predict_layers=0),
    "DeepSeek V3": DEEPSEEK_V3 | dict(model_type="deepseek_v3", architectures=["DeepseekV3ForCausalLM"]) | FP8,
    "DeepSeek V3.2": {key: value for key, value in DEEPSEEK_V3.items() if key != "auto_map"}
    | dict(model_type="deepseek_v32", architectures=["DeepseekV32ForCausalLM"], index_head_dim=128, index_n_heads=64)
    | dict(index_topk=2048)
    | FP8,
    "Qwen3 32B FP8": published("Qwen3 4B") | FP8,
    "Qwen3 Next 80B A3B FP8": published("release of qwen3_next") | FP8,
    "gpt-oss 20B": published("gpt-oss 20B in bfloat16")
    | dict(quantization_config=dict(quant_method="mxfp4", modules_to_not_convert=["lm_head", "model.embed_tokens"])),
    "Llama 3.1 8B AWQ": published("Llama 3.1 8B Instruct")
    | dict(quantization_config=dict(quant_method="awq", bits=4, group_size=128, version="gemm", zero_point=True)),
    "Qwen2.5 0.5B GPTQ Int4": published("Qwen2.5 0.5B")
    | dict(
        quantization_config=dict(quant_method="gptq", bits=4, group_size=128, desc_act=False, sym=True)
        | dict(damp_percent=0.01, static_groups=False, true_sequential=True, model_file_base_name="model")
    ),
    "Llama 3.1 8B bitsandbytes 8 bits": published("Llama 3.1 8B Instruct")
    | dict(quantization_config=dict(quant_method="bitsandbytes", load_in_8bit=True, llm_int8_threshold=6.0)),
    "Llama 3.1 8B bitsandbytes 4 bits": published("Llama 3.1 8B Instruct")
    | dict(
        quantization_config=dict(quant_method="bitsandbytes", load_in_4bit=True, load_in_8bit=False)
        | dict(bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype="bfloat16")
        | dict(bnb_4bit_quant_storage="uint8", llm_int8_threshold=6.0, llm_int8_skip_modules=None)
    ),
}
MORE["Kimi K2.5"] = whole(
    "kimi_k25",
    "KimiK25ForConditionalGeneration",
    MORE["Kimi K2"] | dict(architectures=["DeepseekV3ForCausalLM"], quantization_config=INT4),
    auto_map=dict(AutoModelForCausalLM="modeling_kimi_k25.KimiK25ForConditionalGeneration"),
    media_placeholder_token_id=163605,
    ignore_index=-100,
    pad_token_id=163839,
    use_unified_vision_chunk=True,
    video_placeholder="<|kimi_k25_video_placeholder|>",
    tie_word_embeddings=False,
    dtype="bfloat16",
)
LLAVA = dict(image_token_index=32000, ignore_index=-100, projector_hidden_act="gelu", torch_dtype="float16")
LLAVA |= dict(image_seq_length=576, vision_feature_layer=-2, vision_feature_select_strategy="default")
TILES = dict(image_grid_pinpoints=[[336, 672]], use_image_newline_parameter=True, tie_word_embeddings=False)
VICUNA = dict(model_type="llama", max_position_embeddings=4096, rms_norm_eps=1e-5, vocab_size=32064)
VICUNA |= dict(architectures=["LlamaForCausalLM"], torch_dtype="float16", _name_or_path="lmsys/vicuna-7b-v1.5")
# Keys that Idefics' training code left in text_config.
IDEFICS = dict(_flash_attn_2_enabled=True, is_llama_config=True, neftune_noise_alpha=0.0, pixel_shuffle_factor=4)
IDEFICS |= dict(perceiver_config={"_attn_implementation_autoset": False}, qk_layer_norms=False, use_resampler=False)
IDEFICS |= dict(rope_interleaved=False, rope_theta=100000, pad_token_id=2, torch_dtype="bfloat16")
QWEN2_05B = text("qwen2", 896, 24, 14, 2, 4864, 152000, max_position_embeddings=32768, max_window_layers=24)
QWEN2_05B |= dict(rms_norm_eps=1e-6, rope_theta=1000000.0, sliding_window=32768, use_sliding_window=False)
MORE |= {
    "LLaVA 1.5 7B": whole("llava", "LlavaForConditionalGeneration", VICUNA, **LLAVA),
    "LLaVA 1.6 Mistral 7B": whole(
        "llava_next",
        "LlavaNextForConditionalGeneration",
        dict(model_type="mistral", intermediate_size=14336, max_position_embeddings=32768, num_key_value_heads=8)
        | dict(rms_norm_eps=1e-5, rope_theta=1000000.0, sliding_window=None, vocab_size=32064),
        **LLAVA | TILES,
    ),
    "LLaVA OneVision 0.5B": whole(
        "llava_onevision",
        "LlavaOnevisionForConditionalGeneration",
        QWEN2_05B | dict(tie_word_embeddings=True),
        **LLAVA | TILES | dict(vision_aspect_ratio="anyres_max_9", video_token_index=151647),
    ),
    "InternVL3 1B hf": whole(
        "internvl",
        "InternVLForConditionalGeneration",
        QWEN2_05B | dict(vocab_size=151674),
        **dict(downsample_ratio=0.5, image_seq_length=256, image_token_id=151667, projector_hidden_act="gelu"),
        **dict(torch_dtype="bfloat16", vision_feature_layer=-1, vision_feature_select_strategy="default"),
    ),
    "SmolVLM 256M": whole(
        "smolvlm",
        "SmolVLMForConditionalGeneration",
        text("llama", 576, 30, 9, 3, 1536, 49280, head_dim=64, max_position_embeddings=8192, rms_norm_eps=1e-5)
        | IDEFICS,
        **dict(image_token_id=49190, scale_factor=4, tie_word_embeddings=False, use_cache=False),
    ),
    "Idefics3 8B Llama3": whole(
        "idefics3",
        "Idefics3ForConditionalGeneration",
        dict(model_type="llama", intermediate_size=14336, max_position_embeddings=131072, num_key_value_heads=8)
        | dict(rms_norm_eps=1e-5, rope_theta=500000.0, vocab_size=128259, pad_token_id=128002),
        **dict(image_token_id=128257, scale_factor=2, tie_word_embeddings=False, torch_dtype="bfloat16"),
    ),
}
OMNI_IDS = dict(audio_start_token_id=151647, audio_end_token_id=151648, image_token_index=151655, user_token_id=872)
OMNI_IDS |= dict(audio_token_index=151646, video_token_index=151656, vision_start_token_id=151652)
OMNI3_IDS = dict(audio_start_token_id=151669, audio_end_token_id=151670, audio_token_id=151675, user_token_id=872)
TTS = dict(tts_bos_token_id=151672, tts_eos_token_id=151673, tts_pad_token_id=151671)
MORE |= {
    "Qwen2.5 Omni 7B": dict(
        model_type="qwen2_5_omni",
        architectures=["Qwen2_5OmniModel"],
        enable_audio_output=True,
        enable_talker=True,
        talker_config=dict(model_type="qwen2_5_omni_talker", hidden_size=896, tie_word_embeddings=False),
        token2wav_config=dict(model_type="qwen2_5_omni_token2wav"),
        thinker_config=whole(
            "qwen2_5_omni_thinker",
            "Qwen2OmniNaViTThinkerForConditionalGeneration",
            text("qwen2_5_omni_text", 3584, 28, 28, 4, 18944, 152064, max_position_embeddings=32768)
            | dict(rope_scaling=dict(mrope_section=[16, 24, 24], rope_type="default", type="default"))
            | dict(init_std=0.02, max_window_layers=28, rms_norm_eps=1e-6, rope_theta=1000000.0, sliding_window=32768)
            | dict(use_sliding_window=False),
            audio_config=dict(model_type="qwen2_5_omni_audio_encoder"),
            **OMNI_IDS,
            **dict(ignore_index=-100, position_id_per_seconds=25, seconds_per_chunk=2, pad_token_id=151643),
        ),
        torch_dtype="bfloat16",
        transformers_version="4.50.0.dev0",
    ),
    "Qwen3 Omni 30B A3B": dict(
        model_type="qwen3_omni_moe",
        architectures=["Qwen3OmniMoeForConditionalGeneration"],
        enable_audio_output=True,
        talker_config=dict(model_type="qwen3_omni_moe_talker", text_config=dict(hidden_size=1024)),
        code2wav_config=dict(model_type="qwen3_omni_moe_code2wav"),
        thinker_config=whole(
            "qwen3_omni_moe_thinker",
            "Qwen3OmniMoeThinkerForConditionalGeneration",
            text("qwen3_omni_moe_text", 2048, 48, 32, 4, 768, 152064, head_dim=128, max_position_embeddings=65536)
            | dict(rope_scaling=dict(interleaved=True, mrope_interleaved=True, mrope_section=[24, 20, 20]))
            | dict(moe_intermediate_size=768, shared_expert_intermediate_size=0, use_qk_norm=True, rms_norm_eps=1e-6)
            | dict(rope_theta=1000000, sliding_window=None, use_sliding_window=False, **EXPERTS_80B),
            audio_config=dict(model_type="qwen3_omni_moe_audio_encoder"),
            **QWEN_IMAGES | OMNI3_IDS | dict(position_id_per_seconds=13, seconds_per_chunk=2, dtype="bfloat16"),
        ),
        **TTS | dict(im_start_token_id=151644, im_end_token_id=151645, system_token_id=8948, user_token_id=872),
        assistant_token_id=77091,
        dtype="bfloat16",
        transformers_version="4.57.0.dev0",
    ),
}
LFM2 = {key: value for key, value in published("release of lfm2").items() if key != "full_attn_idxs"}
LFM2 |= dict(layer_types=[FULL if i in (2, 5, 8, 10, 12, 14) else "conv" for i in range(16)], tie_embedding=True)
LFM2_IMAGES = dict(image_token_index=396, max_image_tokens=256, min_image_tokens=64, max_num_patches=1024)
LFM2_IMAGES |= dict(max_pixels_tolerance=2.0, max_tiles=10, min_tiles=2, tile_size=512, use_thumbnail=True)
LFM2_IMAGES |= dict(do_image_splitting=True, downsample_factor=2, encoder_patch_size=16, vision_feature_layer=-1)
LFM2_IMAGES |= dict(projector_bias=True, projector_hidden_act="gelu", projector_hidden_size=2560)
EXAONE4 = published("release of exaone4") | dict(model_type="exaone4_5_text", vocab_size=153600)
MORE |= {
    "LFM2 VL 1.6B": whole(
        "lfm2_vl",
        "Lfm2VlForConditionalGeneration",
        LFM2,
        **LFM2_IMAGES,
        use_image_special_tokens=True,
        dtype="bfloat16",
    ),
    "EXAONE 4.5 33B": whole(
        "exaone4_5",
        "Exaone4_5_ForConditionalGeneration",
        EXAONE4,
        **dict(image_token_id=67, video_token_id=68, tie_word_embeddings=False, dtype="bfloat16"),
    ),
}
# Classes without a family here, so far: model_type -> class, and for multimodal models the model_type of `text_config`.
CLASSES: dict[str, tuple[str, str | None]] = {
    "apertus": ("ApertusForCausalLM", None),
    "arcee": ("ArceeForCausalLM", None),
    "bailing_moe_v2": ("BailingMoeV2ForCausalLM", None),
    "cohere2": ("Cohere2ForCausalLM", None),
    "gemma3n": ("Gemma3nForConditionalGeneration", "gemma3n_text"),
    "glm4_moe_lite": ("Glm4MoeLiteForCausalLM", None),
    "glm_moe_dsa": ("GlmMoeDsaForCausalLM", None),
    "jamba": ("JambaForCausalLM", None),
    "lfm2": ("Lfm2ForCausalLM", None),
    "minimax_m2": ("MiniMaxM2ForCausalLM", None),
    "nemotron_h": ("NemotronHForCausalLM", None),
    "phi4_multimodal": ("Phi4MultimodalForCausalLM", None),
}
_SUPPORTED = {*FAMILIES, *(wrapper.model_type for family in FAMILIES.values() for wrapper in family.wrappers)}
MORE |= {
    cls.partition("For")[0]: dict(model_type=kind, architectures=[cls])
    | ({} if inside is None else dict(text_config=dict(model_type=inside)))
    for kind, (cls, inside) in CLASSES.items()
    if kind not in _SUPPORTED  # then the family's file has a whole release
}


def outcomes() -> dict[str, list[str]]:
    """Name of a release -> why it is refused; [] if it loads."""
    return {name: architecture_problems(published(name)) for name in PUBLISHED} | {
        name: architecture_problems(raw) for name, raw in MORE.items()
    }


if __name__ == "__main__":
    found = outcomes()
    for name, problems in found.items():
        print(f"{name:34} {'loads' if not problems else 'refused: ' + problems[0]}")
        for problem in problems[1:]:
            print(f"{'':34} and: {problem}")
    counts = Counter("refused" if problems else "load" for problems in found.values())
    print(", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())), f"of {len(found)}")
