"""Command R: attention and MLP of a block read the output of one LayerNorm without bias, logits have a scale, and
neighbouring dimensions rotate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megagrpo.models.families.architecture import HfConfig
from megagrpo.models.families.dense import DENSE
from megagrpo.models.families.family import FULL, REQUIRED, Family, Raw, Table, rope

PARALLEL: Table = {
    key: rule
    for key, rule in DENSE.items()
    if key not in ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight")
}
COHERE_KEYS = ("layer_norm_eps", "logit_scale")
COHERE_FIXED: dict[str, tuple[Any, str]] = {
    "rms_norm_eps": (None, "vLLM would use RMSNorm, and transformers LayerNorm; remove it"),
    "tie_word_embeddings": (True, "vLLM always ties the LM head to the embedding"),
    "use_parallel_block": (True, "attention and MLP read the same norm"),
    "use_gated_activation": (True, "the MLP has a gate"),
    "position_embedding_type": ("rope_gptj", "neighbouring dimensions rotate"),
    "rope_interleaved": (True, "this family rotates neighbouring dimensions"),
    "rotary_pct": (1.0, "all dimensions of a head rotate"),
    "order_of_interleaved_layers": ("local_attn_first", "blocks with a window come first"),
}
# of the code that trained the releases; layer_switch is sliding_window_pattern
COHERE_IGNORED = ("use_embedding_sharing", "use_parallel_embedding", "layer_switch")
COHERE_REQUIRED = (*REQUIRED, *COHERE_KEYS)


def parallel(raw: Raw, common: HfConfig, theta: float) -> HfConfig:
    """Return the architecture of a Command R, with the base `theta` of the rotation if config.json has none."""
    return replace(
        common,
        parallel_blocks=True,
        norm_eps=raw["layer_norm_eps"],
        logit_scale=raw["logit_scale"],
        rope_theta=rope({"rope_theta": theta} | raw)["rope_theta"],
        rotary_interleaved=True,
        tied_embeddings=True,
    )


def head_problems(raw: Raw) -> list[str]:
    """Return why transformers would compute heads of another size than config.json says."""
    if raw.get("head_dim") and raw["head_dim"] * raw.get("num_attention_heads", 0) != raw.get("hidden_size"):
        said = f"config.json has head_dim={raw['head_dim']}, which transformers ignores"
        return [f"{said}; it must be hidden_size / num_attention_heads"]
    return []


FAMILY = Family(
    "cohere",
    "CohereForCausalLM",
    table=lambda hf: PARALLEL,
    read=lambda raw, common: parallel(raw, common, 5e5),
    problems=head_problems,
    required=COHERE_REQUIRED,
    keys=COHERE_KEYS,
    ignored=COHERE_IGNORED,
    fixed=COHERE_FIXED,
    layer_types=(FULL,),
)
