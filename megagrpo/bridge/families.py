"""One table per model family: Megatron parameter -> rule. Load, export and live sync all read these and nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import Tensor, nn

from megagrpo.bridge.blocks import Block, Local, Rule, gated, in_layer, qkv, same, vocab
from megagrpo.parallel.layout import Layout
from megagrpo.policy.hf_config import HfConfig
from megagrpo.policy.specs import BLOCK

from megatron.core.utils import unwrap_model  # isort: skip  (after megagrpo.parallel, which prepares the platform)

EMBEDDING = "embedding.word_embeddings.weight"
HEAD = "output_layer.weight"

_LAYER = "model.layers.{L}."
_ATTENTION = _LAYER + "self_attn."
_MLP = _LAYER + "mlp."

# Keys are parameter names of HybridModel without "decoder.layers.N."; Transformer Engine keeps a norm inside the linear that follows it.
DENSE: dict[str, Rule] = {
    EMBEDDING: vocab("model.embed_tokens.weight"),
    HEAD: vocab("lm_head.weight"),
    "decoder.final_norm.weight": same("model.norm.weight"),
    "input_layernorm.weight": same(_LAYER + "input_layernorm.weight"),
    "self_attention.linear_qkv.layer_norm_weight": same(_LAYER + "input_layernorm.weight"),
    "self_attention.linear_qkv.weight": qkv(_ATTENTION + "{p}_proj.weight"),
    "self_attention.linear_proj.weight": same(_ATTENTION + "o_proj.weight"),
    "pre_mlp_layernorm.weight": same(_LAYER + "post_attention_layernorm.weight"),
    "mlp.linear_fc1.layer_norm_weight": same(_LAYER + "post_attention_layernorm.weight"),
    "mlp.linear_fc1.weight": gated(_MLP + "gate_proj.weight", _MLP + "up_proj.weight"),
    "mlp.linear_fc2.weight": same(_MLP + "down_proj.weight"),
}
QKV_BIAS: dict[str, Rule] = {"self_attention.linear_qkv.bias": qkv(_ATTENTION + "{p}_proj.bias")}
QK_NORM: dict[str, Rule] = {
    "self_attention.q_layernorm.weight": same(_ATTENTION + "q_norm.weight"),
    "self_attention.k_layernorm.weight": same(_ATTENTION + "k_norm.weight"),
}

TABLES: dict[str, dict[str, Rule]] = {
    "llama": DENSE,
    "mistral": DENSE,
    "qwen2": DENSE | QKV_BIAS,
    "qwen3": DENSE | QK_NORM,
}

_IN_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")


def blocks(chunks: list[nn.Module], hf_config: HfConfig, layout: Layout) -> Iterator[tuple[str, Tensor, list[Block]]]:
    """(name, parameter, its blocks) for every parameter of this rank, in model order; local and without communication.

    Names are unique within the rank: those of later virtual stages start with "chunkN.". The blocks cover the parameter, rows of
    the padded vocabulary excepted. Tied embeddings on two pipeline stages come twice, with equal blocks. KeyError when the family
    has no rule for a parameter.
    """
    table = TABLES[hf_config.family]
    for i, chunk in enumerate(chunks):
        model = unwrap_model(chunk)
        for name, param in model.named_parameters():
            place = _IN_LAYER.fullmatch(name)
            key, layer = (place[2], _block_number(model, int(place[1]))) if place else (name, None)
            if key == HEAD and hf_config.tied_embeddings:
                key = EMBEDDING  # the last stage's copy
            if key not in table:
                raise KeyError(f"family {hf_config.family} has no rule for Megatron parameter {name}")
            local = Local(param, layout.tp_size, layout.tp_rank, hf_config)
            yield f"chunk{i}.{name}" if i else name, param, [in_layer(block, layer) for block in table[key](local)]


def _block_number(model: nn.Module, index: int) -> int:
    """Number of the decoder block, from 0 over all pipeline stages, that the hybrid layer at `index` belongs to."""
    return (model.decoder.layers[index].layer_number - 1) // len(BLOCK)
