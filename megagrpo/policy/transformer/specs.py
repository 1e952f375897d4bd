"""Layer specs of HybridModel: Transformer Engine's layers where it runs, else plain torch and Megatron's linears.

A decoder block is two hybrid layers: "*" attention, "+" latent attention, "G" Gated DeltaNet, "M" Mamba-2 or short
convolutions, then "-" MLP or "E" experts; or one of them. Both specs write the same checkpoint keys.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)
from torch import Tensor

from megagrpo.families.hf_config import HfConfig
from megagrpo.families.shared.recurrence import GatedDelta
from megagrpo.families.shared.recurrence import ShortConv as ShortConvSizes
from megagrpo.policy.attention.global_heads import heads_by_block
from megagrpo.policy.attention.head_norms import late, wide_normed
from megagrpo.policy.attention.latent_attention import LatentAttention
from megagrpo.policy.attention.packed import Rotary, TorchAttention
from megagrpo.policy.attention.prefixes import prefixed
from megagrpo.policy.attention.sparse import SparseAttention
from megagrpo.policy.blocks.falcon_h1_block import beside_mixer, scaled_mlp
from megagrpo.policy.blocks.gated_delta import GatedDeltaNet
from megagrpo.policy.blocks.mamba2 import Mamba2
from megagrpo.policy.blocks.parallel_blocks import FirstNorm, LayerNorm, SameNorm
from megagrpo.policy.blocks.short_conv import ShortConv
from megagrpo.policy.layers.activations import with_xielu
from megagrpo.policy.layers.elementwise import geglu, swiglu
from megagrpo.policy.layers.norm_modules import RMSNorm, post_normed
from megagrpo.policy.moe.experts_beside_mlp import beside_mlp

LAYERS_PER_BLOCK = 2  # hybrid layers in a decoder block with both parts
BLOCK_SCALE = "block_scale"  # buffer of a decoder block's second layer, where the block's output has a factor
# Transformer Engine fuses the norm into the linear. Mapping to its keys keeps CPU and GPU checkpoints interchangeable.
ATTENTION_KEYS = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
RECURRENT_KEYS = {"input_layernorm.": "self_attention.in_proj.layer_norm_"}
MAMBA_KEYS = {"norm.": "mixer.in_proj.layer_norm_"}
MLP_KEYS = {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}


def layer_pattern(hf_config: HfConfig, stages: Sequence[int]) -> str:
    """Return HybridModel's layer pattern of the whole model. `stages` holds each stage's number of decoder blocks."""
    attention, recurrent = "+" if hf_config.mla else "*", "G" if isinstance(hf_config.recurrence, GatedDelta) else "M"

    def symbols_of(block: int) -> str:
        mixing = recurrent if hf_config.is_recurrent(block) else attention * hf_config.has_attention(block)
        return mixing + ("E" if hf_config.has_experts(block) else "-" * hf_config.has_mlp(block))

    symbols = map(symbols_of, range(hf_config.num_layers))
    return "|".join("".join(next(symbols) for _ in range(blocks)) for blocks in stages)


PLAIN_NORM = ModuleSpec(module=RMSNorm, params={"centred": False})


class GatedActivation(torch.nn.Module):
    """The activation module of Megatron's MLP: `elementwise.swiglu` or `geglu`."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.function = geglu if config.activation_func is F.gelu else swiglu

    def forward(self, x: Tensor) -> Tensor:
        """Return the activation [..., F] of x [..., 2 F]."""
        return self.function(x)


@functools.cache
def rotating(base: Any) -> Any:
    """Return a subclass of `base`, an attention that takes prefixes, that rotates a pack's queries and keys by
    `rotary`, as `TorchAttention` does."""

    class Rotating(base):
        rotary: Rotary | None = None  # set by build._set_rotary

        def forward(
            self, query: Tensor, key: Tensor, *args: Any, packed_seq_params: PackedSeqParams, **kwargs: Any
        ) -> Tensor:
            """Return the attention [T, h * d] of query [T, h, d] and key [T, g, d]."""
            assert self.rotary is not None, "build._set_rotary has not run"
            query, key = self.rotary.rotate_pack(query, key, packed_seq_params)
            return super().forward(query, key, *args, packed_seq_params=packed_seq_params, **kwargs)

    return Rotating


class LocalHybridStack(HybridStack):
    """HybridStack with our final norm: megatron-core 0.19 hard-codes Transformer Engine's. Can go when specs set it."""

    def __init__(
        self, config: TransformerConfig, submodules: HybridStackSubmodules, post_layer_norm: bool = True, **kwargs: Any
    ):
        super().__init__(config, submodules, post_layer_norm=False, **kwargs)
        self.post_layer_norm = post_layer_norm
        if self.post_process and post_layer_norm:
            norm = LayerNorm if config.normalization == "LayerNorm" else RMSNorm
            self.final_norm = norm(config, config.hidden_size, config.layernorm_epsilon)


def _classes(hf_config: HfConfig, norm: type, mixer: ModuleSpec) -> tuple[Any, Any]:
    """Return the classes of self-attention and MLP, with the norms that Megatron's lack, and the `mixer` of blocks that
    have it beside attention."""
    attention = wide_normed(SelfAttention) if hf_config.wide_qk_norm else SelfAttention
    if hf_config.global_heads is not None:
        attention = heads_by_block(attention, hf_config)
    if hf_config.beside_attention is not None:
        attention = beside_mixer(attention, hf_config.beside_attention, mixer)
    mlp = with_xielu(MLP) if hf_config.activation == "xielu" else MLP
    if hf_config.mlp_scales != (1.0, 1.0):
        mlp = scaled_mlp(mlp, *hf_config.mlp_scales)
    if not hf_config.post_norms:
        return attention, mlp
    return post_normed(attention, norm), post_normed(mlp, norm)


def _block_norms(hf_config: HfConfig, norm: Any) -> tuple[Any, Any]:
    """Return the classes of the norms before attention and before the MLP."""
    if hf_config.parallel_blocks:
        return FirstNorm, SameNorm
    return (norm, norm) if hf_config.pre_norms else (IdentityOp, IdentityOp)


@functools.cache
def _mlp_layer(hf_config: HfConfig) -> Any:
    """Return the class of hybrid layers with an MLP."""
    if not hf_config.wide_borrowers:
        return MLPLayer

    class WidthByBlock(MLPLayer):
        def __init__(self, config: TransformerConfig, submodules: Any, layer_number: int, *args: Any, **kwargs: Any):
            config = copy.copy(config)  # borrowers are on the only pipeline stage, so the number is the whole model's
            config.ffn_hidden_size = hf_config.in_block((layer_number - 1) // LAYERS_PER_BLOCK).intermediate_size
            super().__init__(config, submodules, layer_number, *args, **kwargs)

    return WidthByBlock


def _mixture_class(hf_config: HfConfig, norm: type) -> Any:
    """Return the class of a layer's experts. Beside an MLP they normalise their input themselves."""
    return beside_mlp(norm) if hf_config.experts and hf_config.experts.beside_mlp else MoELayer


def _head_norm(hf_config: HfConfig, norm: type) -> Any:
    """Return the class of the norm of each head's queries and keys; None if there is none."""
    if not hf_config.qk_norm or hf_config.wide_qk_norm:
        return None
    return late(RMSNorm) if hf_config.late_qk_norm else norm  # Transformer Engine's norm is no class


def _latent_core(hf_config: HfConfig) -> Any:
    """Return the core attention of latent attention without Transformer Engine's."""
    if hf_config.indexer is None:
        return TorchAttention
    return ModuleSpec(module=SparseAttention, params={"indexer": hf_config.indexer})


def _mamba(hf_config: HfConfig, column: Any, row: Any) -> ModuleSpec:
    """Return the spec of the mixer of Mamba-2 or of short convolutions with these linears."""
    submodules = MambaMixerSubmodules(in_proj=column, out_proj=row)
    mixer = ShortConv if isinstance(hf_config.recurrence, ShortConvSizes) else Mamba2
    return ModuleSpec(module=mixer, params={"sizes": hf_config.recurrence}, submodules=submodules)


def local_spec(hf_config: HfConfig) -> ModuleSpec:
    """Return the spec of the stack without Transformer Engine."""
    mixer = _mamba(hf_config, ColumnParallelLinear, RowParallelLinear)
    attention_class, mlp_class = _classes(hf_config, RMSNorm, mixer)
    input_norm, mlp_norm = _block_norms(hf_config, RMSNorm)
    attention_layer, latent_layer = (
        TransformerLayerSubmodules(
            input_layernorm=input_norm,
            self_attention=ModuleSpec(
                module=module, params={"attn_mask_type": AttnMaskType.causal}, submodules=submodules
            ),
            self_attn_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map=keys,
        )
        for module, submodules, keys in (
            (attention_class, _local_attention(hf_config), ATTENTION_KEYS),
            (LatentAttention, _local_latent(hf_config), {}),
        )
    )
    recurrent = GatedDeltaNetSubmodules(in_proj=ColumnParallelLinear, out_norm=PLAIN_NORM, out_proj=RowParallelLinear)
    recurrent_layer = TransformerLayerSubmodules(
        input_layernorm=RMSNorm,
        self_attention=ModuleSpec(module=GatedDeltaNet, submodules=recurrent),
        self_attn_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map=RECURRENT_KEYS,
    )
    mamba_layer = MambaLayerSubmodules(
        norm=RMSNorm, mixer=mixer, mamba_bda=get_bias_dropout_add, sharded_state_dict_keys_map=MAMBA_KEYS
    )
    mlp_layer, moe_layer = _local_mlps(hf_config, mlp_class, mlp_norm)
    return ModuleSpec(
        module=LocalHybridStack,
        submodules=HybridStackSubmodules(
            attention_layer=ModuleSpec(module=TransformerLayer, submodules=attention_layer),
            mla_layer=ModuleSpec(module=TransformerLayer, submodules=latent_layer),
            gdn_layer=ModuleSpec(module=TransformerLayer, submodules=recurrent_layer),
            mamba_layer=ModuleSpec(module=MambaLayer, submodules=mamba_layer),
            mlp_layer=ModuleSpec(module=_mlp_layer(hf_config), submodules=mlp_layer),
            moe_layer=ModuleSpec(module=MoETransformerLayer, submodules=moe_layer),
        ),
    )


def _local_attention(hf_config: HfConfig) -> SelfAttentionSubmodules:
    head_norm = _head_norm(hf_config, RMSNorm)
    return SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear,
        core_attention=TorchAttention,
        linear_proj=RowParallelLinear,
        q_layernorm=head_norm,
        k_layernorm=head_norm,
    )


def _local_latent(hf_config: HfConfig) -> MLASelfAttentionSubmodules:
    return MLASelfAttentionSubmodules(
        linear_q_proj=ColumnParallelLinear,
        linear_q_up_proj=ColumnParallelLinear,
        linear_kv_up_proj=ColumnParallelLinear,
        core_attention=_latent_core(hf_config),
        linear_proj=RowParallelLinear,
        q_layernorm=RMSNorm,
        kv_layernorm=RMSNorm,
    )


def _local_mlps(
    hf_config: HfConfig, mlp_class: Any, norm: Any
) -> tuple[TransformerLayerSubmodules, TransformerLayerSubmodules]:
    """Return what layers with an MLP, after this `norm`, and layers with experts consist of."""
    activation = GatedActivation if hf_config.gated_mlp else None
    mlp = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear, activation_func=activation)
    mlp_layer = TransformerLayerSubmodules(
        pre_mlp_layernorm=norm,
        mlp=functools.partial(mlp_class.as_mlp_submodule, submodules=mlp),
        mlp_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map=MLP_KEYS,
    )
    experts = MoESubmodules(
        experts=functools.partial(SequentialMLP, submodules=mlp),
        shared_experts=functools.partial(SharedExpertMLP, submodules=mlp),
    )
    mixture_class = _mixture_class(hf_config, RMSNorm)
    # Transformer Engine's spec does not fuse this norm either, because the router reads its output too.
    moe_layer = TransformerLayerSubmodules(
        pre_mlp_layernorm=RMSNorm if mixture_class is MoELayer else IdentityOp,
        mlp=functools.partial(mixture_class, submodules=experts),
        mlp_bda=get_bias_dropout_add,
    )
    return mlp_layer, moe_layer


def transformer_engine_spec(
    hf_config: HfConfig,
    own_linears: bool = False,
    in_fp8: bool = False,
    own_experts: bool = False,
    own_attention: bool = False,
    own_rotation: bool = True,
) -> ModuleSpec:
    """Return megatron-core's own Transformer Engine stack, with the norms that it leaves out.

    With `own_linears` the norm before linears outside experts is a separate module, so adapters can read its output.
    These linears are Megatron's, or with `in_fp8` Transformer Engine's. With `own_experts` too, a layer's experts are
    such linears, computed one after the other. With `own_attention` core attention is `TorchAttention`. With
    `own_rotation` Transformer Engine's attention rotates by `Rotary`; Megatron's unfused rotation makes the host wait
    in each layer.
    """
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm, TERowParallelLinear
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec

    spec = copy.deepcopy(hybrid_stack_spec)
    layer, mlp_layer = spec.submodules.attention_layer.submodules, spec.submodules.mlp_layer.submodules
    attention, latent = layer.self_attention.submodules, spec.submodules.mla_layer.submodules.self_attention
    latent.module, latent.submodules.q_layernorm, latent.submodules.kv_layernorm = LatentAttention, TENorm, TENorm
    recurrent_layer = spec.submodules.gdn_layer.submodules
    recurrent = recurrent_layer.self_attention.submodules
    recurrent_layer.self_attention.module, recurrent.out_norm = GatedDeltaNet, PLAIN_NORM
    mamba_layer = spec.submodules.mamba_layer.submodules
    mixer = mamba_layer.mixer.submodules
    mamba_layer.mixer = _mamba(hf_config, mixer.in_proj, mixer.out_proj)
    if head_norm := _head_norm(hf_config, TENorm):
        attention.q_layernorm = attention.k_layernorm = head_norm
    if own_attention:
        attention.core_attention, latent.submodules.core_attention = TorchAttention, _latent_core(hf_config)
    else:
        attention.core_attention = prefixed(attention.core_attention)
        latent.submodules.core_attention = prefixed(latent.submodules.core_attention)
        if own_rotation or not hf_config.rotates_alike:
            attention.core_attention = rotating(attention.core_attention)
    if hf_config.parallel_blocks:
        spec.module = LocalHybridStack
    moe = spec.submodules.moe_layer.submodules
    # Transformer Engine's linears after a norm contain it
    two_readers = hf_config.parallel_blocks or hf_config.beside_attention is not None
    if own_linears or not hf_config.pre_norms or two_readers:
        own = (ColumnParallelLinear, RowParallelLinear)
        column, row = (TEColumnParallelLinear, TERowParallelLinear) if in_fp8 or not own_linears else own
        layer.input_layernorm, mlp_layer.pre_mlp_layernorm = _block_norms(hf_config, TENorm)
        recurrent_layer.input_layernorm = mamba_layer.norm = TENorm
        mamba_layer.mixer = _mamba(hf_config, column, row)
        _separate_norms(spec.submodules, column, row, own_experts)
    attention_class, mlp_class = _classes(hf_config, TENorm, mamba_layer.mixer)
    layer.self_attention.module, spec.submodules.mlp_layer.module = attention_class, _mlp_layer(hf_config)
    if mlp_class is not MLP:
        mlp_layer.mlp = functools.partial(mlp_class.as_mlp_submodule, **mlp_layer.mlp.keywords)
    if (mixture_class := _mixture_class(hf_config, TENorm)) is not MoELayer:
        moe.pre_mlp_layernorm, moe.mlp = IdentityOp, functools.partial(mixture_class, **moe.mlp.keywords)
    return spec


def _separate_norms(stack: HybridStackSubmodules, column: Any, row: Any, own_experts: bool) -> None:
    """Give the layers of a stack linears that contain no norm, and the keys of checkpoints for norms beside them. With
    `own_experts` a layer's experts are such linears too."""
    layer, mlp_layer = stack.attention_layer.submodules, stack.mlp_layer.submodules
    attention, latent = layer.self_attention.submodules, stack.mla_layer.submodules.self_attention.submodules
    attention.linear_qkv, attention.linear_proj = column, row
    layer.sharded_state_dict_keys_map, mlp_layer.sharded_state_dict_keys_map = ATTENTION_KEYS, MLP_KEYS
    recurrent_layer = stack.gdn_layer.submodules
    recurrent = recurrent_layer.self_attention.submodules
    recurrent.in_proj, recurrent.out_proj = column, row
    recurrent_layer.sharded_state_dict_keys_map = RECURRENT_KEYS
    stack.mamba_layer.submodules.sharded_state_dict_keys_map = MAMBA_KEYS
    mlp = MLPSubmodules(linear_fc1=column, linear_fc2=row)
    mlp_layer.mlp = functools.partial(MLP.as_mlp_submodule, submodules=mlp)
    latent.linear_q_proj = latent.linear_q_up_proj = latent.linear_kv_up_proj = column
    latent.linear_proj = row
    moe = stack.moe_layer.submodules
    grouped = moe.mlp.keywords["submodules"].experts
    in_turn = functools.partial(SequentialMLP, submodules=mlp)
    shared = functools.partial(SharedExpertMLP, submodules=mlp)
    experts = MoESubmodules(experts=in_turn if own_experts else grouped, shared_experts=shared)
    moe.mlp = functools.partial(MoELayer, submodules=experts)
