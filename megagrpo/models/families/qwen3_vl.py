"""Qwen3-VL, dense and with experts: the multimodal models around the text models in `qwen3.py`, and their images."""

from __future__ import annotations

from megagrpo.models.families.blocks import gated, same, stacked, transposed
from megagrpo.models.families.dense import MLP
from megagrpo.models.families.family import Raw, Table
from megagrpo.models.families.vision import axis_problems, qwen_vision
from megagrpo.models.families.wrapper import Wrapper

_GATE_UP, _DOWN = MLP + "experts.gate_up_proj", MLP + "experts.down_proj"
# All experts of a block in one tensor, in which columns are the outputs.
STACKED_EXPERTS: Table = {
    "mlp.experts.linear_fc1.weight": stacked(transposed(gated(_GATE_UP, _GATE_UP))),
    "mlp.experts.linear_fc2.weight": stacked(transposed(same(_DOWN))),
}
_AXES = axis_problems(interleaved=True)


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


QWEN3_VL = Wrapper(
    "qwen3_vl",
    "Qwen3VLForConditionalGeneration",
    prefix="model.language_model.",
    texts=("qwen3_vl_text",),
    defaults=dict(num_key_value_heads=32, head_dim=128, rope_theta=5e5),
    problems=_AXES,
    vision=qwen_vision("Qwen3VLVisionModel", interleaved=True, deepstack=True),
)
QWEN3_VL_MOE = Wrapper(
    "qwen3_vl_moe",
    "Qwen3VLMoeForConditionalGeneration",
    prefix="model.language_model.",
    texts=("qwen3_vl_moe_text",),
    defaults=dict(num_key_value_heads=16, rope_theta=5e5, norm_topk_prob=True),
    problems=_problems,
    vision=qwen_vision("Qwen3VLMoeVisionModel", interleaved=True, deepstack=True),
)
