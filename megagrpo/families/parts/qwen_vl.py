"""Multimodal models around Qwen's text models, and their images."""

from __future__ import annotations

from typing import Any

from megagrpo.families.parts.llama_table import MLP
from megagrpo.families.shared.blocks import gated, same, stacked, transposed
from megagrpo.families.shared.family import Raw, Table
from megagrpo.families.shared.vision import axis_problems, qwen_vision
from megagrpo.families.shared.wrapper import Wrapper

_GATE_UP, _DOWN = MLP + "experts.gate_up_proj", MLP + "experts.down_proj"
# All experts of a block in one tensor, in which columns are the outputs.
STACKED_EXPERTS: Table = {
    "mlp.experts.linear_fc1.weight": stacked(transposed(gated(_GATE_UP, _GATE_UP))),
    "mlp.experts.linear_fc2.weight": stacked(transposed(same(_DOWN))),
}
_AXES = axis_problems(interleaved=True)


def qwen_vl(
    kind: str, architecture: str, tower: str, interleaved: bool = True, deepstack: bool = False, **fields: Any
) -> Wrapper:
    """Return a multimodal Qwen with transformers' class `tower` for images. `fields` are of `Wrapper`."""
    usual: dict[str, Any] = dict(prefix="model.language_model.", problems=axis_problems(interleaved))
    vision = qwen_vision(tower, interleaved=interleaved, deepstack=deepstack)
    return Wrapper(kind, architecture, vision=vision, **(usual | fields))


def _problems(raw: Raw) -> list[str]:
    text, problems = raw["text_config"], _AXES(raw)
    width, hidden, normalised = text["moe_intermediate_size"], text["hidden_size"], text.get("norm_topk_prob", True)
    if normalised is not True:
        said = f"config.json has norm_topk_prob={normalised}, and transformers always normalises the weights"
        problems.append(f"{said} of a token's experts here; set norm_topk_prob to true")
    if hidden in (width, 2 * width):
        said = f"config.json has moe_intermediate_size={width} with hidden_size={hidden}: transformers and vLLM read"
        problems.append(f"{said} experts of this shape in different orders; set moe_intermediate_size to another width")
    return problems


_QWEN2: dict[str, Any] = dict(interleaved=False, prefix="model.")
_QWEN2 |= dict(defaults=dict(num_key_value_heads=8, rms_norm_eps=1e-5, rope_theta=1e6))
QWEN2_VL = (
    qwen_vl(
        *("qwen2_vl", "Qwen2VLForConditionalGeneration", "Qwen2VisionTransformerPretrainedModel"),
        texts=("qwen2_vl_text",),
        **_QWEN2,
    ),
    qwen_vl(
        *("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VisionTransformerPretrainedModel"),
        texts=("qwen2_5_vl_text",),
        **_QWEN2,
    ),
)
QWEN3_VL = qwen_vl(
    *("qwen3_vl", "Qwen3VLForConditionalGeneration", "Qwen3VLVisionModel"),
    deepstack=True,
    texts=("qwen3_vl_text",),
    defaults=dict(num_key_value_heads=32, head_dim=128, rope_theta=5e5),
)
QWEN3_VL_MOE = qwen_vl(
    *("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration", "Qwen3VLMoeVisionModel"),
    deepstack=True,
    texts=("qwen3_vl_moe_text",),
    defaults=dict(num_key_value_heads=16, rope_theta=5e5, norm_topk_prob=True),
    problems=_problems,
)
