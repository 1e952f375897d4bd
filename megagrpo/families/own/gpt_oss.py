"""GPT-OSS: a bias in every linear and router, sinks (a learned share of attention that contributes 0), and experts with
a clamped gate. Files hold a block's experts as one tensor, transposed, gate and up columns interleaved."""

from __future__ import annotations

from dataclasses import replace

from megagrpo.families.parts.llama_table import ATTENTION, DENSE, MLP, QKV_BIAS
from megagrpo.families.shared.architecture import HfConfig
from megagrpo.families.shared.blocks import Block, BlockRule, Local, same
from megagrpo.families.shared.boxes import Box
from megagrpo.families.shared.family import EXPERT_KEYS, FULL, SLIDING, Family, Raw, expert_problems, mixture, windows


def _of_expert(local: Local, *dims: tuple[int, int, int]) -> tuple[tuple[int, ...], Box]:
    """Return the shape for all experts and the box of this one; `dims` are the other axes' (length, start, stop)."""
    assert local.expert is not None, "only parameters of experts have these rules"
    lengths, starts, stops = zip(*dims, strict=True)
    return (local.hf.mixture.count, *lengths), ((local.expert, *starts), (local.expert + 1, *stops))


def _gate_up(name: str) -> BlockRule:
    """Gate and up projection of each expert [H, 2 I], or their bias [2 I]: even columns are the gate's, odd ones the up
    projection's. Megatron keeps this rank's rows of the gate above its rows of the up projection."""

    def blocks(local: Local) -> list[Block]:
        rows, rest = local.param.shape[0] // 2, tuple(local.param.shape[1:])
        columns = (2 * rows * local.tp_size, 2 * rows * local.tp_rank, 2 * rows * (local.tp_rank + 1))
        shape, box = _of_expert(local, *((n, 0, n) for n in rest), columns)
        return [
            Block(name, shape, box, grid=(2, rows, *rest), axis=0, at=0, count=2, order=(2, 1, 0) if rest else (1, 0))
        ]

    return BlockRule((name,), blocks)


def _down(name: str) -> BlockRule:
    """Down projection of each expert [I, H], or bias [H]. Megatron shards columns of the transpose, not the bias."""

    def blocks(local: Local) -> list[Block]:
        width, *rows = local.param.shape
        own = ((n * local.tp_size, n * local.tp_rank, n * (local.tp_rank + 1)) for n in rows)
        shape, box = _of_expert(local, *own, (width, 0, width))
        return [Block(name, shape, box, grid=(width, *rows), axis=0, at=0, count=width, order=(1, 0) if rows else None)]

    return BlockRule((name,), blocks)


_TABLE = {key: rule for key, rule in (DENSE | QKV_BIAS).items() if not key.startswith("mlp.")}
_TABLE |= {
    "self_attention.linear_proj.bias": same(ATTENTION + "o_proj.bias"),
    "self_attention.core_attention.softmax_offset": same(ATTENTION + "sinks"),
    "mlp.router.weight": same(MLP + "router.weight"),
    "mlp.router.bias": same(MLP + "router.bias"),
    "mlp.experts.linear_fc1.weight": _gate_up(MLP + "experts.gate_up_proj"),
    "mlp.experts.linear_fc1.bias": _gate_up(MLP + "experts.gate_up_proj_bias"),
    "mlp.experts.linear_fc2.weight": _down(MLP + "experts.down_proj"),
    "mlp.experts.linear_fc2.bias": _down(MLP + "experts.down_proj_bias"),
}
_FIXED = {
    **dict.fromkeys(("attention_bias", "qkv_bias"), (True, "attention without biases is not supported")),
    "tie_word_embeddings": (False, "vLLM's model has an untied LM head"),
    **{
        key: (value, f"vLLM's model has {value}")
        for key, value in dict(swiglu_alpha=1.702, swiglu_limit=7.0, rms_norm_eps=1e-5).items()
    },
}


def _read(raw: Raw, common: HfConfig) -> HfConfig:
    experts = mixture(raw, clamp=7.0, interleaved=True)
    turns = windows(raw, raw.get("sliding_window", 128), lambda block: block % 2 == 0)
    return replace(common, qkv_bias=True, linear_bias=True, sinks=True, experts=experts, windows=turns, norm_eps=1e-5)


def _problems(raw: Raw) -> list[str]:
    types = raw.get("layer_types") or []
    alternate = types == ([SLIDING, FULL] * len(types))[: len(types)]
    return expert_problems(raw) + (
        [] if alternate else [f"layer_types must alternate {SLIDING} and {FULL}, as vLLM assumes"]
    )


FAMILY = Family(
    "gpt_oss",
    "GptOssForCausalLM",
    table=lambda hf: _TABLE,
    read=_read,
    problems=_problems,
    keys=("sliding_window", "layer_types", *EXPERT_KEYS),
    ignored=("experts_per_token", "initial_context_length"),  # the first release's names of other keys
    fixed=_FIXED,
    rope_types=("yarn",),  # vLLM's model supports no other
)
