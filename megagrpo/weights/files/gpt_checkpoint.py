"""Checkpoints of Megatron-LM's GPTModel: their folders, keys and arguments.

GPTModel keeps attention and MLP of a block in one layer, HybridModel in two. If all blocks are alike, GPTModel stores
each parameter of all layers as one tensor [layers, ...] without a number in its key; else it stores each layer's own.
Linears and norms also have an "extra state", an object that must exist and may be None."""

from __future__ import annotations

import dataclasses
import io
import re
import zipfile
from argparse import Namespace
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.gpt_checkpoint_interop import (
    GPTCompatLayerMaps,
    retarget_sharded_state_dict_to_gpt_checkpoint,
)
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, is_main_replica

from megagrpo.families.shared.architecture import HfConfig
from megagrpo.families.shared.recurrence import Mamba2, ShortConv
from megagrpo.families.weight_sources import MEGATRON_LM, NEMO_WEIGHTS
from megagrpo.platform.process.terminal import warn
from megagrpo.policy.transformer.specs import LAYERS_PER_BLOCK
from megagrpo.weights.files.data_only import COMMON_FILE, read_object
from megagrpo.weights.files.torch_dist import StoredTensors

RELEASE = "release"  # folder and tracker entry of weights without training state
VERSION = 3.0  # of Megatron-LM's checkpoints: the order of queries, keys and values
_FINAL_NORM = "decoder.final_layernorm.weight"
_PREFIXES = ("", "module.", "model.", "model.module.")  # of all keys; NeMo wraps GPTModel in modules of these names
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_NO_EXTRA_STATE = ("embedding.", "output_layer.")
# Norms on the outputs of attention and MLP, which megatron-core's layer specs lack: the keys of Megatron-Bridge,
# which are written, and those of mcore-bridge. Either is read.
_POST_NORMS = {
    "self_attention.post_norm.weight": "self_attention.linear_proj.post_layernorm.weight",
    "mlp.post_norm.weight": "mlp.linear_fc2.post_layernorm.weight",
}
_OTHER_POST_NORMS = {
    "self_attention.linear_proj.post_layernorm.weight": "self_attention.post_self_attn_layernorm.weight",
    "mlp.linear_fc2.post_layernorm.weight": "mlp.post_mlp_layernorm.weight",
}
# Norms that GPTModel stores under another key with Megatron's own layers (of experts) or with Transformer Engine's (of
# latents), which fuse them into the next linear. Both keys are written; either is read.
_OTHER_KEYS = {
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
    "self_attention.kv_layernorm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight",
}
_OTHER_KEYS_OF_LATENT = {
    "self_attention.q_layernorm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
# arguments of Megatron-LM that no shape shows, or that explain why shapes differ: the weights mean something else
_MEANING = (
    *("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "num_experts", "swiglu"),
    *("untie_embeddings_and_output_weights", "add_qkv_bias", "qk_layernorm", "rotary_interleaved"),
)
# arguments with which the same weights compute other numbers
_NUMBERS = ("norm_epsilon", "rotary_base", "rotary_percent", "moe_router_topk", "moe_router_pre_softmax")


def newest_iteration(folder: Path) -> Path:
    """Return the distributed checkpoint that a folder of Megatron-LM's checkpoints names as its latest, the one inside
    a folder of NeMo, or `folder` if it is neither. Raises ValueError when the named one is missing or in Megatron-LM's
    old format."""
    if not (folder / MEGATRON_LM).is_file():
        return (folder / NEMO_WEIGHTS).parent if (folder / NEMO_WEIGHTS).is_file() else folder
    text = (folder / MEGATRON_LM).read_text().strip()
    if text != RELEASE and not text.isdecimal():
        raise ValueError(f"{folder / MEGATRON_LM} holds {text[:40]!r}, not an iteration; name an iter_* folder")
    latest = folder / (RELEASE if text == RELEASE else f"iter_{int(text):07d}")
    if not latest.is_dir():
        raise ValueError(f"{folder / MEGATRON_LM} names {latest.name}, which does not exist; copy the checkpoint again")
    if any(latest.glob("mp_rank_*")):
        fix = "load and save it in Megatron-LM with --ckpt-convert-format torch_dist"
        raise ValueError(f"{latest} is in Megatron-LM's old format (mp_rank_*), one file per rank; {fix}")
    return latest


class GptKeys:
    """The keys of GPTModel for a model of `blocks` blocks: `stacked` as one tensor of all layers, or per layer. All
    have `prefix`. `stored` are the keys of an existing checkpoint, without it."""

    def __init__(self, hf_config: HfConfig, stacked: bool, stored: Collection[str] = (), prefix: str = ""):
        self.blocks, self.stacked, self._stored, self._prefix = hf_config.num_layers, stacked, stored, prefix
        self._second_keys = _OTHER_KEYS | (_OTHER_KEYS_OF_LATENT if hf_config.mla else {})
        self._aliases = self._second_keys | _OTHER_POST_NORMS
        self._maps = GPTCompatLayerMaps(
            attention_to_gpt={LAYERS_PER_BLOCK * block: block for block in range(self.blocks)},
            mlp_to_gpt={LAYERS_PER_BLOCK * block + 1: block for block in range(self.blocks)},
            fresh_init=frozenset(),
            num_gpt_layers=self.blocks,
        )

    @classmethod
    def to_write(cls, hf_config: HfConfig) -> GptKeys:
        """Return the keys under which GPTModel saves this model. Raises ValueError if GPTModel lacks a part of it."""
        if parts := _beyond_gpt(hf_config):
            raise ValueError(
                f"--megatron-lm: Megatron-LM's GPTModel has no {', '.join(parts)}, as in {hf_config.family}; convert "
                "without --megatron-lm"
            )
        mixed = {hf_config.has_experts(block) for block in range(hf_config.num_layers)}
        return cls(hf_config, stacked=len(mixed) == 1)

    @classmethod
    def of(cls, stored: StoredTensors, hf_config: HfConfig) -> GptKeys | None:
        """Return the keys of a stored checkpoint, or None if HybridModel has written it."""
        keys = stored.metadata.state_dict_metadata
        prefix = next((prefix for prefix in _PREFIXES if prefix + _FINAL_NORM in keys), None)
        if prefix is None:
            return None
        names = {key.removeprefix(prefix) for key in keys}
        return cls(hf_config, not any(_LAYER.match(name) for name in names), names, prefix)

    def apply(self, state: dict[str, Any]) -> None:
        """Give the entries of a chunk's sharded state these keys, in place."""
        if self.stacked:
            retarget_sharded_state_dict_to_gpt_checkpoint(state, self._maps)
        else:
            for entry in state.values():
                if number := _LAYER.match(entry.key):
                    block = int(number[1]) // LAYERS_PER_BLOCK
                    entry.key = f"decoder.layers.{block}.{entry.key[number.end() :]}"
                entry.key = entry.key.replace("decoder.final_norm.", "decoder.final_layernorm.")
        for entry in state.values():
            entry.key = _renamed(entry.key, _POST_NORMS) or entry.key
            if entry.key not in self._stored and (other := _renamed(entry.key, self._aliases)) in self._stored:
                entry.key = other
            entry.key = self._prefix + entry.key

    def also_as(self, pieces: list[ShardedTensor]) -> list[ShardedTensor]:
        """Return copies of the pieces of a parameter that GPTModel also reads under another key, with that key."""
        renamed = [(piece, _renamed(piece.key, self._second_keys)) for piece in pieces]
        return [dataclasses.replace(piece, key=key) for piece, key in renamed if key is not None]


def _renamed(key: str, names: Mapping[str, str]) -> str | None:
    """Return `key` with the new end that `names` gives to its end, or None."""
    for name, other in names.items():
        if key.endswith(f".{name}"):
            return key.removesuffix(name) + other
    return None


def extra_states(places: Iterable[ShardedTensor]) -> dict[str, ShardedObject]:
    """Return the empty extra states that GPTModel expects beside the parameters at `places`, by their unique keys.

    Transformer Engine's linears, norms and attention have one each, Megatron's own linears too. The rank with a
    parameter's first element has its extra state.
    """
    found = {}
    for place in places:
        module = re.sub(r"(layer_norm_)?weight$", "", place.key)
        is_first = is_main_replica(place.replica_id) and not any(place.global_offset[place.prepend_axis_num :])
        if not is_first or module == place.key or module.startswith(_NO_EXTRA_STATE):
            continue
        names = [module]
        if module.endswith("self_attention.linear_proj."):
            names.append(module.replace("linear_proj.", "core_attention."))
        axes = place.prepend_axis_num
        shape, offset = tuple(place.global_shape[:axes]) or (1,), tuple(place.global_offset[:axes]) or (0,)
        for name in names:
            state = ShardedObject(f"{name}_extra_state", None, shape, offset)
            found[state.unique_key] = state
    return found


def _beyond_gpt(hf_config: HfConfig) -> list[str]:
    """Return the parts of a model for which Megatron-LM has no argument: it would compute other numbers."""
    parts = {
        "norms over all heads together": hf_config.wide_qk_norm,
        "head norms after the rotation": hf_config.late_qk_norm,
        "blocks without norms before attention and MLP": not hf_config.pre_norms,
        "attention and MLP on one norm": hf_config.parallel_blocks,
        "trained activation": hf_config.activation == "xielu",
        "scales of residual branches": hf_config.residual_scale != 1,
        "factors on the outputs of blocks": hf_config.block_scales,
        "factors on the parts of an MLP": hf_config.mlp_scales != (1.0, 1.0),
        "scales of logits": hf_config.logit_scale != 1,
        "bias on softmax scores of experts": hf_config.experts is not None and hf_config.experts.softmax_bias,
        "frozen indexer of keys": hf_config.indexer is not None,
        "Mamba-2": isinstance(hf_config.recurrence, Mamba2),
        "short convolutions": isinstance(hf_config.recurrence, ShortConv),
        "blocks of one part": hf_config.mlp_blocks is not None,
    }
    return [part for part, present in parts.items() if present]


def arguments(hf_config: HfConfig) -> dict[str, Any]:
    """Return Megatron-LM's arguments that describe the architecture, by their names there."""
    experts = hf_config.experts
    found: dict[str, Any] = dict(
        num_layers=hf_config.num_layers,
        hidden_size=hf_config.hidden_size,
        ffn_hidden_size=hf_config.intermediate_size,
        num_attention_heads=hf_config.num_heads,
        max_position_embeddings=hf_config.max_positions,
        position_embedding_type="rope",
        add_position_embedding=True,
        rotary_base=hf_config.rope_theta,
        rotary_percent=hf_config.partial_rotary_factor,
        rotary_interleaved=hf_config.rotary_interleaved,
        normalization="RMSNorm",
        norm_epsilon=hf_config.norm_eps,
        apply_layernorm_1p=hf_config.centred_norms,
        qk_layernorm=hf_config.qk_norm or hf_config.mla is not None,
        swiglu=hf_config.activation == "silu",
        squared_relu=hf_config.activation == "relu2",
        add_bias_linear=hf_config.linear_bias,
        add_qkv_bias=hf_config.qkv_bias,
        untie_embeddings_and_output_weights=not hf_config.tied_embeddings,
        num_experts=None,
    )
    if mla := hf_config.mla:
        found |= dict(
            multi_latent_attention=True,
            q_lora_rank=mla.query_rank,
            kv_lora_rank=mla.kv_rank,
            qk_head_dim=mla.nope_dim,
            qk_pos_emb_head_dim=mla.rope_dim,
            v_head_dim=mla.value_dim,
        )
    else:
        groups = hf_config.num_kv_heads
        found |= dict(group_query_attention=True, num_query_groups=groups, kv_channels=hf_config.head_dim)
    if experts is None:
        return found
    return found | dict(
        num_experts=experts.count,
        moe_ffn_hidden_size=experts.intermediate_size,
        moe_router_topk=experts.per_token,
        moe_router_pre_softmax=not experts.normalized,
        moe_layer_freq=[int(hf_config.has_experts(block)) for block in range(hf_config.num_layers)]
        if len(experts.blocks) < hf_config.num_layers
        else 1,
    )


def common_state(hf_config: HfConfig) -> dict[str, Any]:
    """Return what Megatron-LM's loader reads beside the tensors."""
    return dict(args=Namespace(**arguments(hf_config)), checkpoint_version=VERSION, iteration=0)


def check_arguments(stored: StoredTensors, hf_config: HfConfig, model: str) -> None:
    """Compare the arguments in Megatron-LM's checkpoint with `model`, which config.json describes.

    Raises ValueError when they interpret the weights differently. Warns when the same weights compute other numbers,
    and when the checkpoint's arguments cannot be read.
    """
    saved = _arguments_in(stored)
    if saved is None:
        warn(
            f"warning: {stored.folder} has no readable arguments of Megatron-LM, so only shapes were compared; "
            f"make sure that {model} is its model"
        )
        return
    if not saved.get("group_query_attention", True):
        saved |= dict(num_query_groups=saved.get("num_attention_heads"))
    wanted = arguments(hf_config)
    differ = {
        name: f"{name} {saved[name]} (config.json implies {wanted[name]})"
        for name in (*_MEANING, *_NUMBERS)
        if saved.get(name) is not None and name in wanted and saved[name] != wanted[name]
    }
    if wrong := [text for name, text in differ.items() if name in _MEANING]:
        raise ValueError(f"{stored.folder} does not fit {model}: it has {', '.join(wrong)}; name its own model")
    if differ:
        text = ", ".join(differ.values())
        warn(f"warning: {stored.folder} was trained with {text}; set config.json of {model} to these values")


def _arguments_in(stored: StoredTensors) -> dict[str, Any] | None:
    """Return the arguments in a checkpoint, read without running code in it, or None."""
    try:
        common: Any = stored.folder / COMMON_FILE
        source = common if common.is_file() else io.BytesIO(stored.object_bytes("common_state"))
        state = read_object(source, common if source is common else f"common_state of {stored.folder}")
    except (ValueError, OSError, KeyError, RuntimeError, zipfile.BadZipFile):
        return None
    state = state[0] if isinstance(state, list) else state
    found = state.get("args") if isinstance(state, dict) else None
    return None if found is None else dict(vars(found))
