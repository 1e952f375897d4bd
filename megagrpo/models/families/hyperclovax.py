"""HyperCLOVA X: a Granite with norms on the outputs of attention and MLP too, whose factor on the logits is not a
divisor."""

from __future__ import annotations

from dataclasses import replace

from megagrpo.models.families.architecture import HfConfig
from megagrpo.models.families.blocks import same
from megagrpo.models.families.dense import DENSE, LAYER
from megagrpo.models.families.example import LLAMA3_ROPE, Example
from megagrpo.models.families.family import Family, Raw, Table
from megagrpo.models.families.granite import SCALES, TINY_SCALES, scale_problems, scaled

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


_RELEASE: Raw = dict(model_type="hyperclovax", architectures=["HyperCLOVAXForCausalLM"], hidden_size=6144)
_RELEASE |= dict(num_hidden_layers=38, num_attention_heads=48, num_key_value_heads=8, intermediate_size=14336)
_RELEASE |= dict(head_dim=128, vocab_size=110592, max_position_embeddings=131072, rms_norm_eps=1e-5, rope_theta=1e8)
_RELEASE |= dict(attention_multiplier=0.0078125, embedding_multiplier=10.0, logits_scaling=0.125, use_post_norm=True)
_RELEASE |= dict(residual_multiplier=1.0, hidden_act="silu", attention_bias=False, mlp_bias=False, rope_scaling=None)
_RELEASE |= dict(attention_dropout=0.0, initializer_range=0.012, tie_word_embeddings=False, torch_dtype="bfloat16")
FAMILY = Family(
    "hyperclovax",
    "HyperCLOVAXForCausalLM",
    table=lambda hf: DENSE | (_POST_NORMS if hf.post_norms else {}),
    read=_read,
    problems=_problems,
    keys=(*SCALES, "use_post_norm"),
    example=Example(
        models="HyperCLOVA X SEED Think 14B",
        differs="as `granite`, norms on the outputs of attention and MLP",
        cases={
            "hyperclovax": TINY_SCALES | dict(head_dim=16, pad_token_id=0),
            "hyperclovax tied, without these norms, llama3 rope": TINY_SCALES
            | dict(attention_multiplier=None, use_post_norm=False, tie_word_embeddings=True, pad_token_id=0)
            | dict(head_dim=16, rope_parameters=LLAMA3_ROPE),
        },
        release=_RELEASE,
    ),
)
