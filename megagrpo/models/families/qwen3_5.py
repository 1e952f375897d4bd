"""Qwen3.5, dense, alone and inside its multimodal model: Qwen3-Next's blocks, with the projections of Gated DeltaNet in
four tensors. The rotation by three positions is the usual one for text, whose three positions are equal. Layers for
predicting several tokens are not trained."""

from __future__ import annotations

from megagrpo.models.families.blocks import part_rows
from megagrpo.models.families.family import FULL, LINEAR, REQUIRED, Family, Raw
from megagrpo.models.families.hybrid import DELTA, DELTA_KEYS, HYBRID, hybrid
from megagrpo.models.families.qwen3 import HAS_HEAD_NORMS
from megagrpo.models.families.vision import axis_problems, qwen_vision
from megagrpo.models.families.wrapper import Wrapper

_PROJECTIONS = {part: f"{DELTA}in_proj_{name}.weight" for name in ("qkv", "z", "b", "a") for part in name}
TABLE_QWEN3_5 = HYBRID | {"self_attention.in_proj.weight": part_rows(_PROJECTIONS)}
_GATES = ("silu", "swish")  # two names of one function; vLLM reads the key, transformers has no other function


def _problems(raw: Raw) -> list[str]:
    gate = raw.get("output_gate_type") or "silu"
    return [] if gate in _GATES else [f"output_gate_type={gate!r} is not supported; supported: {', '.join(_GATES)}"]


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
)
