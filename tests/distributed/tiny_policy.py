"""Shapes of real model families, and a run shrunk by the functions of `megagrpo verify`. Tests of the policy over ranks
share them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from megagrpo.config import ParallelSection, RunConfig
from megagrpo.families.family_index import FAMILIES
from megagrpo.families.hf_config import HfConfig, parse_hf_config
from megagrpo.proof.verify.shrink import random_samples, shrink_config, shrink_model
from megagrpo.train_types import TrainSample
from tests.family_examples import EXAMPLES, OTHERS, RELEASES

# The relevant part of config.json of SmolLM2, Qwen2.5-7B, Qwen3-0.6B, Qwen3-30B-A3B and Mixtral, with heads that 2 and
# 3 divide. Qwen3 has tied and untied models here, and Qwen2 has its window switched on.
_COMMON = dict(
    num_attention_heads=12, num_key_value_heads=12, intermediate_size=1536, vocab_size=49152, rms_norm_eps=1e-6
)
SHAPES: dict[str, dict[str, Any]] = {
    "llama_tied": _COMMON
    | dict(model_type="llama", num_hidden_layers=24, hidden_size=576, num_key_value_heads=6, tie_word_embeddings=True),
    "qwen2_untied": _COMMON
    | dict(model_type="qwen2", num_hidden_layers=24, hidden_size=3584, tie_word_embeddings=False)
    | dict(use_sliding_window=True, sliding_window=4096, max_window_layers=12),
    "qwen3_tied": _COMMON
    | dict(model_type="qwen3", num_hidden_layers=24, hidden_size=1024, head_dim=128, tie_word_embeddings=True),
    "qwen3_untied": _COMMON
    | dict(model_type="qwen3", num_hidden_layers=24, hidden_size=1024, head_dim=128, tie_word_embeddings=False),
    "qwen3_moe": _COMMON
    | dict(model_type="qwen3_moe", num_hidden_layers=48, hidden_size=2048, head_dim=128, tie_word_embeddings=False)
    | dict(num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True, mlp_only_layers=[1]),
    "mixtral": _COMMON
    | dict(model_type="mixtral", num_hidden_layers=32, hidden_size=4096, tie_word_embeddings=False)
    | dict(num_local_experts=8, num_experts_per_tok=2),
}
# Other families, which only `test_family_gradients.py` tests in layouts.
LONGROPE = dict(type="longrope", short_factor=[1 + i / 40 for i in range(48)], long_factor=[1 + i for i in range(48)])
MORE_SHAPES: dict[str, dict[str, Any]] = {
    "glm4": _COMMON
    | dict(
        model_type="glm4",
        num_hidden_layers=40,
        hidden_size=4096,
        num_key_value_heads=6,
        head_dim=128,
        tie_word_embeddings=False,
    ),
    "phi3": _COMMON
    | dict(model_type="phi3", num_hidden_layers=32, hidden_size=1536, num_key_value_heads=6, tie_word_embeddings=True)
    | dict(
        max_position_embeddings=2**17,
        original_max_position_embeddings=4096,
        partial_rotary_factor=0.75,
        rope_scaling=LONGROPE,
    ),
    "gemma2": _COMMON
    | dict(model_type="gemma2", num_hidden_layers=26, hidden_size=2304, head_dim=256, attn_logit_softcapping=50.0),
    "gemma3": _COMMON
    | dict(
        model_type="gemma3_text",
        num_hidden_layers=26,
        hidden_size=1152,
        head_dim=256,
        sliding_window=512,
        rope_local_base_freq=1e4,
    ),
}


def release_of(kind: str) -> dict[str, Any]:
    """config.json of a published model, of the family's example, of one of its `others`, or else from
    `published_configs.py`."""
    if raw := OTHERS.get(kind) or RELEASES.get(kind):
        return raw
    from tests.unit.families.published_configs import PUBLISHED, published

    return published(next(name for name, (family, _) in PUBLISHED.items() if family == kind))


def shapes_of(kind: str) -> list[str]:
    """The shapes of a family whose steps are compared."""
    return [kind, *EXAMPLES[kind].others]


def released(shape: str) -> dict[str, Any]:
    """`release_of` a family, or one of its `others`, with heads that 2 and 3 divide."""
    raw = release_of(shape)
    real = parse_hf_config(raw)
    alone = real.num_heads == real.num_kv_heads  # no query heads share a KV head
    heads = dict(num_attention_heads=12, num_key_value_heads=12 if alone else 6)
    if real.hidden_size == real.num_heads * real.head_dim:
        heads["hidden_size"] = 12 * real.head_dim
        if "mamba_expand" in raw:
            heads["mamba_n_heads"] = raw["mamba_expand"] * heads["hidden_size"] // raw["mamba_d_head"]
    return raw | heads | {own: heads[usual] for own, usual in FAMILIES[real.family].names.items() if usual in heads}


# Families that only the full suite and `prove_family.py` test in layouts: their shapes are in the families' examples.
RELEASED = {shape: released(shape) for kind in FAMILIES if kind in RELEASES for shape in shapes_of(kind)}
# every small model can be cut this far: tp 1, 2, 3 and 6, four stages
LARGEST = ParallelSection(tp=6, pp=2, vpp=2, ep=2, etp=6)
ONE_STAGE = LARGEST.model_copy(update=dict(pp=1, vpp=1))


def tiny_model(shape: str, largest: ParallelSection = LARGEST) -> HfConfig:
    known = SHAPES | MORE_SHAPES | RELEASED
    return shrink_model(known[shape] if shape in known else released(shape), largest)


def few_samples() -> list[TrainSample]:
    """Two groups of three `random_samples`: truncated responses, an advantage of 0, foreign tokens."""
    drawn = random_samples()
    return [replace(sample, index=i) for i, sample in enumerate([*drawn[:3], *drawn[6:9]])]


def tiny_run(parallel: dict | None = None, **sections: dict) -> RunConfig:
    """The config of a run with only this layout and these sections, shrunk."""
    values = dict(
        model=dict(path="tiny", precision="fp32"),
        parallel=parallel or {},
        algorithm=dict(loss_type="grpo", beta=0.1),
        rollout=dict(temperature=0.8),
        data=dict(train=dict(source="none")),
        rewards=dict(functions=[dict(function="exact_number")]),
        train=dict(distributed_optimizer=False),
    )
    return shrink_config(
        RunConfig.model_validate({name: values.get(name, {}) | sections.get(name, {}) for name in values | sections})
    )


@dataclass(frozen=True)
class Case:
    """A layout with a name."""

    name: str
    ranks: int
    parallel: dict
    train: dict | None = None

    def __str__(self) -> str:
        return self.name

    def config(self, **algorithm) -> RunConfig:
        return tiny_run(self.parallel, algorithm=algorithm, train=self.train or {})


def whole_model(policy) -> list[tuple[str, Any]]:
    """Return (name, whole tensor) of the model with merged adapters on rank 0, empty elsewhere. Collective."""
    from megagrpo.weights.blocks.parameter_blocks import merged_blocks
    from megagrpo.weights.bridge.hf_export import find_sources, stream

    parameters = list(merged_blocks(policy.chunks, policy.hf_config, policy.layout))
    sources = find_sources(parameters, policy.layout)
    return list(stream(parameters, policy.layout, sources, sources))
