"""Llama 4, the text model: attention within chunks of tokens, blocks without rotation whose queries grow with the
position, and a shared expert beside one expert per token, whose input is multiplied by the sigmoid of its score."""

from __future__ import annotations

from dataclasses import replace

from megagrpo.families.parts.llama_table import DENSE, GATE_UP_DOWN, LAYER
from megagrpo.families.shared.architecture import Experts, HfConfig, QueryScale
from megagrpo.families.shared.blocks import gated, same, stacked, transposed
from megagrpo.families.shared.family import CHUNKED, FULL, REQUIRED, ROTARY, Family, Raw, rotates, windows
from megagrpo.families.shared.wrapper import NAMINGS, Wrapper

_MLP = LAYER + "feed_forward."
_GATE_UP, _DOWN = _MLP + "experts.gate_up_proj", _MLP + "experts.down_proj"
_DENSE, _SHARED = ([f"{_MLP}{folder}{name}.weight" for name in GATE_UP_DOWN] for folder in ("", "shared_expert."))
_TABLE = DENSE | {
    "mlp.linear_fc1.weight": gated(*_DENSE[:2]),
    "mlp.linear_fc2.weight": same(_DENSE[2]),
    "mlp.shared_experts.linear_fc1.weight": gated(*_SHARED[:2]),
    "mlp.shared_experts.linear_fc2.weight": same(_SHARED[2]),
    "mlp.router.weight": same(_MLP + "router.weight"),
    "mlp.experts.linear_fc1.weight": stacked(transposed(gated(_GATE_UP, _GATE_UP))),
    "mlp.experts.linear_fc2.weight": stacked(transposed(same(_DOWN))),
}
_TUNING = "attn_temperature_tuning"


def _mixtures(raw: Raw) -> list[int]:
    """Return the blocks with experts."""
    step = raw.get("interleave_moe_layer_step", 1)
    return list(range(step - 1, raw["num_hidden_layers"], step))


def _read(raw: Raw, common: HfConfig) -> HfConfig:
    unrotated = frozenset(block for block in range(common.num_layers) if not rotates(raw)[block])
    width = raw["intermediate_size"]
    experts = Experts(
        *(raw["num_local_experts"], 1, width, False, frozenset(_mixtures(raw))),
        sigmoid=True,
        shared_size=width,
        input_weights=True,
    )
    scale = QueryScale(raw.get("attn_scale", 0.1), raw.get("floor_scale", 8192), unrotated, offset=1)
    return replace(
        common,
        intermediate_size=raw["intermediate_size_mlp"],
        experts=experts,
        mixture_module="feed_forward.",
        rotary_interleaved=True,
        unit_qk_norm=raw.get("use_qk_norm", True),
        unrotated=unrotated,
        query_scale=scale if raw.get(_TUNING, True) and unrotated else None,
        windows=windows(raw, raw["attention_chunk_size"], kind=CHUNKED, slides=lambda block: block not in unrotated),
        chunked=True,
    )


def _problems(raw: Raw) -> list[str]:
    usual = dict(num_hidden_layers=0, no_rope_layer_interval=4, interleave_moe_layer_step=1)
    layers, every, step = (raw.get(key, default) for key, default in usual.items())
    if any(type(number) is not int or number < 1 for number in (layers, every, step)):
        return ["no_rope_layer_interval and interleave_moe_layer_step must be positive whole numbers"]
    turns, problems = rotates(raw), []
    if len(turns) < layers:
        return [f"no_rope_layers has {len(turns)} entries for num_hidden_layers={layers}"]
    kinds = [CHUNKED if rotated else FULL for rotated in turns[:layers]]
    if (raw.get("layer_types") or kinds) != kinds:
        problems.append(f"layer_types must be {CHUNKED} where no_rope_layers is 1, as vLLM assumes, and else {FULL}")
    mixtures = _mixtures(raw)
    if (mixtures if raw.get("moe_layers") is None else raw["moe_layers"]) != mixtures or not mixtures:
        problems.append("moe_layers must be every interleave_moe_layer_step-th block, as vLLM assumes")
    if not any(raw.get(key) for key in ("rope_theta", *ROTARY)):
        problems.append("config.json lacks rope_theta")
    return problems


def _served_flags(hf: HfConfig) -> dict[str, Raw | str]:
    """Return the flag that switches vLLM's growing queries on or off. It ignores the key of config.json."""
    return {"--override-generation-config": {_TUNING: hf.query_scale is not None}}


FAMILY = Family(
    "llama4_text",
    "Llama4ForCausalLM",
    table=lambda hf: _TABLE,
    read=_read,
    problems=_problems,
    required=(
        *(*REQUIRED, "num_key_value_heads", "head_dim", "rms_norm_eps", "intermediate_size_mlp"),
        *("num_local_experts", "attention_chunk_size"),
    ),
    keys=(
        *("intermediate_size_mlp", "num_local_experts", "attention_chunk_size", "no_rope_layers", "use_qk_norm"),
        *("no_rope_layer_interval", "interleave_moe_layer_step", "moe_layers", "layer_types"),
        *(_TUNING, "attn_scale", "floor_scale"),
    ),
    ignored=("for_llm_compressor",),
    fixed={
        "num_experts_per_tok": (1, "Megatron multiplies inputs of experts by their weights only with one expert"),
        "rope_interleaved": (True, "this family rotates neighbouring dimensions"),
    },
    layer_types=(CHUNKED, FULL),
    rope_types=("default", "llama3"),
    names={"intermediate_size_mlp": "intermediate_size"},
    served_flags=_served_flags,
    wrappers=(Wrapper("llama4", "Llama4ForConditionalGeneration", modules=NAMINGS[0]),),
)
