"""Command R, R7B and A."""

from __future__ import annotations

from dataclasses import replace

from megagrpo.families.parts.llama_table import DENSE
from megagrpo.families.shared.architecture import HfConfig
from megagrpo.families.shared.family import FULL, REQUIRED, SLIDING, Family, Raw, Table, rope, windows

# Command R: attention and MLP of a block read the output of one LayerNorm without bias, logits have a scale, and
# neighbouring dimensions rotate.
_PARALLEL: Table = {
    key: rule
    for key, rule in DENSE.items()
    if key not in ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight")
}


def _parallel(raw: Raw, common: HfConfig, theta: float) -> HfConfig:
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


def _head_problems(raw: Raw) -> list[str]:
    """Return why transformers would compute heads of another size than config.json says."""
    if raw.get("head_dim") and raw["head_dim"] * raw.get("num_attention_heads", 0) != raw.get("hidden_size"):
        said = f"config.json has head_dim={raw['head_dim']}, which transformers ignores"
        return [f"{said}; it must be hidden_size / num_attention_heads"]
    return []


COHERE = Family(
    "cohere",
    "CohereForCausalLM",
    table=lambda hf: _PARALLEL,
    read=lambda raw, common: _parallel(raw, common, 5e5),
    problems=_head_problems,
    required=(*REQUIRED, "layer_norm_eps", "logit_scale"),
    keys=("layer_norm_eps", "logit_scale"),
    # of the code that trained the releases; layer_switch is sliding_window_pattern
    ignored=("use_embedding_sharing", "use_parallel_embedding", "layer_switch"),
    fixed={
        "rms_norm_eps": (None, "vLLM would use RMSNorm, and transformers LayerNorm; remove it"),
        "tie_word_embeddings": (True, "vLLM always ties the LM head to the embedding"),
        "use_parallel_block": (True, "attention and MLP read the same norm"),
        "use_gated_activation": (True, "the MLP has a gate"),
        "position_embedding_type": ("rope_gptj", "neighbouring dimensions rotate"),
        "rope_interleaved": (True, "this family rotates neighbouring dimensions"),
        "rotary_pct": (1.0, "all dimensions of a head rotate"),
        "order_of_interleaved_layers": ("local_attn_first", "blocks with a window come first"),
    },
    layer_types=(FULL,),
)


# Command R7B and Command A: a Command R whose blocks have a window, three of four if config.json names none. Blocks
# without a window do not rotate.
def _cohere2_read(raw: Raw, common: HfConfig) -> HfConfig:
    every = raw.get("sliding_window_pattern", 4)
    sizes = windows(raw, raw["sliding_window"], lambda block: (block + 1) % every != 0)
    unrotated = frozenset(block for block, size in enumerate(sizes) if size is None)
    return replace(_parallel(raw, common, 1e4), windows=sizes, unrotated=unrotated)


def _cohere2_problems(raw: Raw) -> list[str]:
    every = raw.get("sliding_window_pattern", 4)
    if type(every) is not int or every < 1:
        return [f"sliding_window_pattern is {every!r} in config.json; it must be a positive whole number"]
    return ([] if raw.get("sliding_window") else ["config.json lacks sliding_window"]) + _head_problems(raw)


def _cohere2_served_flags(hf: HfConfig) -> dict[str, Raw | str]:
    """Return the window with which vLLM lets a token see as many as transformers does: vLLM adds one."""
    size = next(filter(None, hf.windows), None)
    key = {} if size is None else {"sliding_window": size - 1}
    return {"--hf-overrides": key} if key else {}


COHERE2 = replace(
    COHERE,
    model_type="cohere2",
    architecture="Cohere2ForCausalLM",
    read=_cohere2_read,
    problems=_cohere2_problems,
    required=(*COHERE.required, "sliding_window"),
    keys=(*COHERE.keys, "sliding_window", "sliding_window_pattern", "layer_types"),
    ignored=(*COHERE.ignored, "_sliding_window_pattern"),
    layer_types=(FULL, SLIDING),
    served_flags=_cohere2_served_flags,
)
