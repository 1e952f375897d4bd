"""Granite 4 without Mamba: a Granite whose MLP is named as the shared one of models with experts. Models with Mamba
layers are refused."""

from __future__ import annotations

from dataclasses import replace

from megagrpo.models.families.architecture import HfConfig
from megagrpo.models.families.blocks import gated, same
from megagrpo.models.families.dense import DENSE, LAYER
from megagrpo.models.families.example import LLAMA3_ROPE, Example
from megagrpo.models.families.family import FULL, LINEAR, REQUIRED, Family, Raw
from megagrpo.models.families.granite import SCALES, TINY_SCALES, scale_problems, scaled

_IN, _OUT = LAYER + "shared_mlp.input_linear.weight", LAYER + "shared_mlp.output_linear.weight"
_TABLE = DENSE | {"mlp.linear_fc1.weight": gated(_IN, _IN), "mlp.linear_fc2.weight": same(_OUT)}
_ATTENTION, _MAMBA = (FULL, "attention"), (LINEAR, "mamba")  # each with its name in older files
_SIZES = "chunk_size conv_bias d_conv d_head d_state expand n_groups n_heads proj_bias"
_MAMBA_KEYS = tuple(f"mamba_{key}" for key in _SIZES.split())


def _read(raw: Raw, common: HfConfig) -> HfConfig:
    blocks = range(common.num_layers)
    return replace(
        scaled(raw, common),
        intermediate_size=raw["shared_intermediate_size"],
        unrotated=frozenset() if raw.get("position_embedding_type") == "rope" else frozenset(blocks),
    )


def _problems(raw: Raw) -> list[str]:
    problems, types = scale_problems(raw), raw.get("layer_types") or _MAMBA[:1]
    if any(kind in _MAMBA for kind in types):
        problems.append(
            "config.json has Mamba-2 layers, which are not supported: megatron-core's MambaMixer needs the kernels of "
            "mamba_ssm, which run on GPUs only, and no other is here. Granite 4.0 micro, 1b and 350m (without -h-) "
            "have attention only: docs/add_a_model.md"
        )
    if raw.get("position_embedding_type") not in (None, "rope", "nope"):
        problems.append(f"position_embedding_type={raw['position_embedding_type']} is neither rope nor nope")
    return problems


_TINY: Raw = TINY_SCALES | dict(layer_types=[FULL] * 4, num_local_experts=0, shared_intermediate_size=80)
_TINY |= dict(mamba_n_heads=6, time_step_limit=None, position_embedding_type="rope")
FAMILY = Family(
    "granitemoehybrid",
    "GraniteMoeHybridForCausalLM",
    table=lambda hf: _TABLE,
    read=_read,
    problems=_problems,
    required=(*REQUIRED, "num_local_experts", "shared_intermediate_size", "layer_types"),
    keys=(*SCALES, "shared_intermediate_size", "position_embedding_type", "layer_types"),
    ignored=(*_MAMBA_KEYS, "time_step_limit", "init_method", "num_experts_per_tok"),
    fixed={
        "num_local_experts": (0, "experts are supported in granitemoe, not here"),
        "normalization_function": ("rmsnorm", "only rmsnorm is supported"),
    },
    layer_types=(*_ATTENTION, *_MAMBA),
    names={"shared_intermediate_size": "intermediate_size"},
    merged_only=("input_linear",),  # gate and up projection, for which vLLM expects two adapters
    example=Example(
        models="Granite 4.0 micro, 1B and 350M, without Mamba",
        differs="as `granite`, rotation optional",
        cases={
            "granitemoehybrid": _TINY,
            "granitemoehybrid tied, llama3 rope": _TINY | dict(tie_word_embeddings=True, rope_parameters=LLAMA3_ROPE),
            "granitemoehybrid without rotation": _TINY | dict(position_embedding_type=None),
        },
        release=dict(
            model_type="granitemoehybrid",
            architectures=["GraniteMoeHybridForCausalLM"],
            attention_bias=False,
            attention_dropout=0.0,
            attention_multiplier=0.015625,
            bos_token_id=100257,
            embedding_multiplier=12,
            eos_token_id=100257,
            hidden_act="silu",
            hidden_size=2560,
            init_method="mup",
            initializer_range=0.1,
            intermediate_size=8192,
            layer_types=["attention"] * 40,
            logits_scaling=10,
            mamba_chunk_size=256,
            mamba_conv_bias=True,
            mamba_d_conv=4,
            mamba_d_head=64,
            mamba_d_state=256,
            mamba_expand=2,
            mamba_n_groups=1,
            mamba_n_heads=80,
            mamba_proj_bias=False,
            max_position_embeddings=131072,
            normalization_function="rmsnorm",
            num_attention_heads=40,
            num_experts_per_tok=0,
            num_hidden_layers=40,
            num_key_value_heads=8,
            num_local_experts=0,
            output_router_logits=False,
            pad_token_id=100256,
            position_embedding_type="rope",
            residual_multiplier=0.22,
            rms_norm_eps=1e-05,
            rope_scaling=None,
            rope_theta=10000000,
            router_aux_loss_coef=0.01,
            shared_intermediate_size=8192,
            tie_word_embeddings=True,
            torch_dtype="bfloat16",
            transformers_version="4.56.0",
            use_cache=True,
            vocab_size=100352,
        ),
    ),
)
