"""HyperCLOVA X: a Granite with norms on the outputs of attention and MLP too, whose factor on the logits is not a
divisor."""

from __future__ import annotations

from dataclasses import replace

from megagrpo.models.families.architecture import HfConfig
from megagrpo.models.families.blocks import same
from megagrpo.models.families.dense import DENSE, LAYER
from megagrpo.models.families.family import Family, Raw, Table
from megagrpo.models.families.granite import SCALES, scale_problems, scaled

_POST_NORMS: Table = {
    "self_attention.post_norm.weight": same(LAYER + "post_norm1.weight"),
    "mlp.post_norm.weight": same(LAYER + "post_norm2.weight"),
}


def _read(raw: Raw, common: HfConfig) -> HfConfig:
    attention = raw.get("attention_multiplier")
    return replace(
        scaled(raw, common),
        softmax_scale=common.head_dim**-0.5 if attention is None else attention,
        logit_scale=raw.get("logits_scaling", 1.0),
        post_norms=raw.get("use_post_norm", True),
    )


def _problems(raw: Raw) -> list[str]:
    return scale_problems({key: value for key, value in raw.items() if (key, value) != ("attention_multiplier", None)})


FAMILY = Family(
    "hyperclovax",
    "HyperCLOVAXForCausalLM",
    table=lambda hf: DENSE | (_POST_NORMS if hf.post_norms else {}),
    read=_read,
    problems=_problems,
    keys=(*SCALES, "use_post_norm"),
)
