"""Qwen3.5 with experts, alone and inside its multimodal model: a dense Qwen3.5 whose blocks have a mixture of experts
and a shared expert with a gate."""

from __future__ import annotations

from dataclasses import replace

from megagrpo.models.families.architecture import HfConfig
from megagrpo.models.families.dense import GATE_UP_DOWN, SHARED_GATE, experts, shared_experts
from megagrpo.models.families.family import EXPERT_KEYS, Raw, expert_problems, mixture
from megagrpo.models.families.hybrid import hybrid
from megagrpo.models.families.qwen3_5 import FAMILY as DENSE
from megagrpo.models.families.qwen3_5 import TABLE_QWEN3_5
from megagrpo.models.families.vision import axis_problems, qwen_vision
from megagrpo.models.families.wrapper import Wrapper

_TABLE = TABLE_QWEN3_5 | experts("mlp", *GATE_UP_DOWN) | shared_experts("shared_expert") | SHARED_GATE
_SIZES = ("moe_intermediate_size", "shared_expert_intermediate_size")


def _read(raw: Raw, common: HfConfig) -> HfConfig:
    width, shared = (raw[key] for key in _SIZES)
    routed = mixture(raw, intermediate_size=width, shared_size=shared, shared_gate=True)
    return replace(hybrid(raw, common), intermediate_size=width, experts=routed)  # no block has a dense MLP


_EVERY = "every block of this family has experts"

FAMILY = replace(
    DENSE,
    model_type="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    table=lambda hf: _TABLE,
    read=_read,
    problems=lambda raw: DENSE.problems(raw) + expert_problems(raw, *((key,) for key in _SIZES)),
    required=tuple(key for key in DENSE.required if key != "intermediate_size"),
    keys=(*DENSE.keys, *EXPERT_KEYS, *_SIZES),
    fixed=DENSE.fixed
    | {
        "mlp_only_layers": ([], _EVERY),
        "decoder_sparse_step": (1, _EVERY),
        "norm_topk_prob": (True, "the weights of a token's experts add up to 1 in this family"),
    },
    wrappers=(
        Wrapper(
            "qwen3_5_moe",
            "Qwen3_5MoeForConditionalGeneration",
            "model.language_model.",
            problems=axis_problems(interleaved=True),
            vision=qwen_vision("Qwen3_5MoeVisionModel", interleaved=True),
        ),
    ),
)
