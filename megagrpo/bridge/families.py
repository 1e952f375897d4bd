"""One table per model family: Megatron parameter -> rule. Load, export and live sync all read these and nothing else."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from megagrpo.bridge.blocks import Block, Local, Rule, gated, in_layer, qkv, same, vocab
from megagrpo.parallel.layout import Layout
from megagrpo.policy.hf_config import HfConfig
from megagrpo.policy.lora import is_adapter
from megagrpo.policy.specs import BLOCK
from megagrpo.policy.stored import StoredWeight

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
# Folder and projections (gate, up, down) of the experts in Hugging Face's names; the router is FOLDER.gate.
EXPERTS: dict[str, tuple[str, tuple[str, str, str]]] = {
    "qwen3_moe": ("mlp", ("gate_proj", "up_proj", "down_proj")),
    "mixtral": ("block_sparse_moe", ("w1", "w3", "w2")),
}
QKV_BIAS: dict[str, Rule] = {"self_attention.linear_qkv.bias": qkv(_ATTENTION + "{p}_proj.bias")}
QK_NORM: dict[str, Rule] = {
    "self_attention.q_layernorm.weight": same(_ATTENTION + "q_norm.weight"),
    "self_attention.k_layernorm.weight": same(_ATTENTION + "k_norm.weight"),
}


def _experts(family: str) -> dict[str, Rule]:
    """Rules of the router and of every expert, with {E} for its number."""
    folder, projections = EXPERTS[family]
    gate, up, down = (f"{_LAYER}{folder}.experts.{{E}}.{p}.weight" for p in projections)
    return {
        "mlp.router.weight": same(f"{_LAYER}{folder}.gate.weight"),
        "mlp.experts.linear_fc1.weight": gated(gate, up),
        "mlp.experts.linear_fc2.weight": same(down),
    }


TABLES: dict[str, dict[str, Rule]] = {
    "llama": DENSE,
    "mistral": DENSE,
    "qwen2": DENSE | QKV_BIAS,
    "qwen3": DENSE | QK_NORM,
    "qwen3_moe": DENSE | QK_NORM | _experts("qwen3_moe"),
    "mixtral": DENSE | _experts("mixtral"),
}

# Adapters as PEFT names them, below the name of the model that they are wrapped around.
PEFT = "base_model.model."
ADAPTED = {p: _ATTENTION for p in ("q_proj", "k_proj", "v_proj", "o_proj")} | {p: _MLP for p in ("gate_proj", "up_proj", "down_proj")}

_IN_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
# Each expert a module of its own, or Transformer Engine's grouped linear with one weight per expert.
_EXPERT = re.compile(r"(mlp\.experts\.)(?:local_experts\.(\d+)\.)?(linear_fc[12]\.weight)(\d*)")
_ADAPTER = re.compile(r".+\.adapter\.(\w+)\.(lora_[AB])")


def blocks(chunks: list[nn.Module], hf_config: HfConfig, layout: Layout) -> Iterator[tuple[str, Tensor, list[Block]]]:
    """(name, parameter, its blocks) for every weight of the model on this rank, adapters left out, in model order; local and without
    communication.

    Names are unique within the rank: those of later virtual stages start with "chunkN.". The blocks cover the parameter, rows of
    the padded vocabulary excepted. Tied embeddings on two pipeline stages come twice, with equal blocks. KeyError when the family
    has no rule for a parameter. In place of a weight that is kept in fewer bits comes the `StoredWeight`.
    """
    table = TABLES[hf_config.family]
    for i, chunk in enumerate(chunks):
        model = unwrap_model(chunk)
        for name, param in model.named_parameters():
            if is_adapter(name):
                continue
            param = getattr(model.get_submodule(name.rpartition(".")[0]), "stored", param) if name.endswith(".weight") else param
            place = _IN_LAYER.fullmatch(name)
            key, layer = (place[2], _block_number(model, int(place[1]))) if place else (name, None)
            if key == HEAD and hf_config.tied_embeddings:
                key = EMBEDDING  # the last stage's copy
            tensor_parallel, expert = (layout.tp_size, layout.tp_rank), None
            if part := _EXPERT.fullmatch(key):
                key, tensor_parallel = part[1] + part[3], (layout.etp_size, layout.etp_rank)
                expert = int(part[2] or part[4]) + layout.ep_rank * (hf_config.experts.count // layout.ep_size)
            if key not in table:
                raise KeyError(f"family {hf_config.family} has no rule for Megatron parameter {name}")
            found = table[key](Local(param, *tensor_parallel, hf_config))
            yield f"chunk{i}.{name}" if i else name, param, [in_layer(block, layer, expert) for block in found]


@torch.no_grad()
def fill(param: Tensor, found: list[Block], value_of: Callable[[Block], Tensor]) -> None:
    """Write `value_of(block)`, in `block_shape`, into a parameter that `blocks` has yielded; what no block covers, padding, becomes 0."""
    dense = param.data
    dense.zero_()
    for block in found:
        place = block.view(dense)
        place.copy_(value_of(block).reshape(place.shape))
    if isinstance(param, StoredWeight):
        param.store(dense)


def adapter_blocks(chunks: list[nn.Module], hf_config: HfConfig, layout: Layout) -> Iterator[tuple[str, Tensor, list[Block]]]:
    """As `blocks`, of the adapters alone: one block each, in a tensor with the name that PEFT gives it in a file."""
    for i, chunk in enumerate(chunks):
        model = unwrap_model(chunk)
        for name, param in model.named_parameters():
            if not is_adapter(name):
                continue
            place = _IN_LAYER.fullmatch(name)
            projection, matrix = _ADAPTER.fullmatch(place[2]).groups()
            rule = same(f"{PEFT}{ADAPTED[projection]}{projection}.{matrix}.weight")
            (block,) = rule(Local(param, layout.tp_size, layout.tp_rank, hf_config))
            yield f"chunk{i}.{name}" if i else name, param, [in_layer(block, _block_number(model, int(place[1])))]


def trained_blocks(chunks: list[nn.Module], hf_config: HfConfig, layout: Layout) -> list[tuple[str, Tensor, list[Block]]]:
    """What has a gradient: the adapters where there are any, else all weights."""
    return list(adapter_blocks(chunks, hf_config, layout)) or list(blocks(chunks, hf_config, layout))


def _block_number(model: nn.Module, index: int) -> int:
    """Number of the decoder block, from 0 over all pipeline stages, that the hybrid layer at `index` belongs to."""
    return (model.decoder.layers[index].layer_number - 1) // BLOCK


def tensor_names(hf_config: HfConfig) -> set[str]:
    """Every tensor name of the whole model; a tied model may carry the head as well."""
    names = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    attention = ["input_layernorm.weight", "post_attention_layernorm.weight"] + [f"self_attn.{p}_proj.weight" for p in "qkvo"]
    attention += [f"self_attn.{p}_proj.bias" for p in "qkv"] if hf_config.qkv_bias else []
    attention += [f"self_attn.{p}_norm.weight" for p in "qk"] if hf_config.qk_norm else []
    dense = [f"mlp.{p}_proj.weight" for p in ("gate", "up", "down")]
    mixed = _expert_names(hf_config) if hf_config.experts else []
    for block in range(hf_config.num_layers):
        names |= {f"model.layers.{block}.{part}" for part in attention + (mixed if hf_config.has_experts(block) else dense)}
    return names


def _expert_names(hf_config: HfConfig) -> list[str]:
    folder, projections = EXPERTS[hf_config.family]
    each = [f"{folder}.experts.{e}.{p}.weight" for e in range(hf_config.experts.count) for p in projections]
    return [f"{folder}.gate.weight", *each]
