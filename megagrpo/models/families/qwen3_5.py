"""Qwen3.5, dense, alone and inside its multimodal model: Qwen3-Next's blocks, with the projections of Gated DeltaNet in
four tensors. The rotation by three positions is the usual one for text, whose three positions are equal. Layers for
predicting several tokens are not trained."""

from __future__ import annotations

from megagrpo.models.families.blocks import part_rows
from megagrpo.models.families.example import Example
from megagrpo.models.families.family import FULL, LINEAR, REQUIRED, Family, Raw
from megagrpo.models.families.hybrid import DELTA, DELTA_KEYS, HYBRID, SERVED_DELTA, hybrid
from megagrpo.models.families.qwen3 import HAS_HEAD_NORMS
from megagrpo.models.families.vision import axis_problems, qwen_vision
from megagrpo.models.families.wrapper import Wrapper

_PROJECTIONS = {part: f"{DELTA}in_proj_{name}.weight" for name in ("qkv", "z", "b", "a") for part in name}
TABLE_QWEN3_5 = HYBRID | {"self_attention.in_proj.weight": part_rows(_PROJECTIONS)}
_GATES = ("silu", "swish")  # two names of one function; vLLM reads the key, transformers has no other function


def _problems(raw: Raw) -> list[str]:
    gate = raw.get("output_gate_type") or "silu"
    return [] if gate in _GATES else [f"output_gate_type={gate!r} is not supported; supported: {', '.join(_GATES)}"]


_ROPE = dict(rope_type="default", rope_theta=1e4, mrope_interleaved=True)
TINY_QWEN3_5: Raw = dict(
    rope_parameters=_ROPE | dict(partial_rotary_factor=0.25, mrope_section=[2, 1, 1]),
    head_dim=24,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    rms_norm_eps=1e-2,
)
TINY_QWEN3_5 |= dict(linear_key_head_dim=12, linear_value_head_dim=20, layer_types=[LINEAR, FULL] * 2)
ALIKE_QWEN3_5: Raw = TINY_QWEN3_5 | dict(linear_num_key_heads=6, linear_num_value_heads=6, linear_key_head_dim=16)
ALIKE_QWEN3_5 |= dict(linear_value_head_dim=8, linear_conv_kernel_dim=3, layer_types=[FULL, LINEAR, LINEAR, LINEAR])
ALIKE_QWEN3_5 |= dict(tie_word_embeddings=True)
ALIKE_QWEN3_5 |= dict(rope_parameters=_ROPE | dict(partial_rotary_factor=0.5, mrope_section=[3, 3, 2]))
_TOWER: Raw = dict(depth=1, hidden_size=32, intermediate_size=48, num_heads=2, num_position_embeddings=16)
WHOLE_QWEN3_5: Raw = dict(vision_config=_TOWER | dict(out_hidden_size=96), image_token_id=126, video_token_id=125)
WHOLE_QWEN3_5 |= dict(vision_start_token_id=124, vision_end_token_id=123)
FAMILY = Family(
    "qwen3_5_text",
    "Qwen3_5ForCausalLM",
    table=lambda hf: TABLE_QWEN3_5,
    read=hybrid,
    problems=_problems,
    required=(*REQUIRED, *DELTA_KEYS, "num_key_value_heads", "head_dim"),
    keys=(*DELTA_KEYS, "layer_types", "full_attention_interval", "output_gate_type"),
    # the precision of vLLM's recurrent state, the dropped layers, and a key of models with experts
    ignored=("mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mlp_only_layers"),
    fixed=HAS_HEAD_NORMS
    | {
        "attn_output_gate": (True, "attention of this family has an output gate"),
        "layer_scale": (False, "scales of whole layers are not supported"),
    },
    untrained=lambda hf: (r"mtp\..+",),
    wrappers=(
        Wrapper(
            "qwen3_5",
            "Qwen3_5ForConditionalGeneration",
            "model.language_model.",
            problems=axis_problems(interleaved=True),
            vision=qwen_vision("Qwen3_5VisionModel", interleaved=True),
        ),
    ),
    rope_types=("default", "yarn"),
    rope_keys=("mrope_section", "mrope_interleaved"),
    partial_rotary_factor=0.25,
    layer_types=(FULL, LINEAR),
    example=Example(
        models="Qwen3.5 and Qwen3.6, dense",
        differs="Gated DeltaNet in three of four blocks, a gate on attention",
        cases={"qwen3_5": TINY_QWEN3_5, "qwen3_5 tied, as many key as value heads": ALIKE_QWEN3_5},
        wrapped={"qwen3_5": WHOLE_QWEN3_5},
        release=dict(
            architectures=["Qwen3_5ForCausalLM"],
            model_type="qwen3_5_text",
            attention_bias=False,
            attention_dropout=0.0,
            attn_output_gate=True,
            dtype="bfloat16",
            eos_token_id=248044,
            full_attention_interval=4,
            head_dim=256,
            hidden_act="silu",
            hidden_size=2560,
            initializer_range=0.02,
            intermediate_size=9216,
            linear_conv_kernel_dim=4,
            linear_key_head_dim=128,
            linear_num_key_heads=16,
            linear_num_value_heads=32,
            linear_value_head_dim=128,
            mamba_ssm_dtype="float32",
            max_position_embeddings=262144,
            mlp_only_layers=[],
            mtp_num_hidden_layers=1,
            mtp_use_dedicated_embeddings=False,
            num_attention_heads=16,
            num_hidden_layers=32,
            num_key_value_heads=4,
            rms_norm_eps=1e-06,
            rope_parameters=dict(
                mrope_interleaved=True, mrope_section=[11, 11, 10], rope_type="default", rope_theta=10000000
            )
            | dict(partial_rotary_factor=0.25),
            tie_word_embeddings=True,
            use_cache=True,
            vocab_size=248320,
        ),
        served=SERVED_DELTA,
        served_dtype="bfloat16",
    ),
)
