"""Megatron's configuration of a model: architecture, layout, fused kernels, recomputation and FP8."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import fp8_utils
from megatron.core.activations import squared_relu
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor

from megagrpo.config import ParallelSection
from megagrpo.families.hf_config import HfConfig
from megagrpo.families.shared.family import rope
from megagrpo.families.shared.recurrence import GatedDelta
from megagrpo.platform import device
from megagrpo.policy.fp8.fp8_settings import Fp8
from megagrpo.policy.layers.elementwise import xielu
from megagrpo.policy.transformer.message_overlap import overlap_config


def _recompute_config(hf_config: HfConfig, recompute: str, modules: Sequence[str]) -> dict[str, Any]:
    """The fields of Megatron's configuration for recomputation."""
    if recompute == "selective":
        # Without Transformer Engine experts have no grouped products, and megatron-core 0.19 fails for norms (NameError
        # in its checkpoint). The MLP of a parallel block reads the output of the norm before attention.
        left_out = set() if device.has_transformer_engine() else {"moe_act", "layernorm"}
        left_out |= {"layernorm"} if hf_config.parallel_blocks else set()
        chosen = [name for name in modules if name not in left_out]
        return dict(recompute_granularity="selective", recompute_modules=chosen)
    # each decoder block stores one activation checkpoint, at its entry
    if recompute == "full":
        return dict(
            recompute_granularity="full", recompute_method="uniform", recompute_num_layers=hf_config.layers_per_block
        )
    return {}


@dataclass(frozen=True)
class ModelOptions:
    """Build settings besides architecture and layout. `recompute`, `recompute_modules`, `fusions` are `model` keys."""

    dtype: torch.dtype  # of weights and activations
    recompute: str = "none"
    recompute_modules: Sequence[str] = ("core_attn",)
    fusions: Sequence[str] = ()
    sequence_parallel: bool = False
    init_weights: bool = True  # False: uninitialised memory, for callers that load all weights
    own_linears: bool = False  # no linear contains a norm, so that adapters or stored weights can replace parts
    own_experts: bool = False  # each expert is a module with Megatron's linears, for adapters and stored weights
    longest_sequence: int | None = None  # for `build.rotary_frequencies`
    fp8: Fp8 | None = None  # how the blocks' linears multiply
    overlap: Sequence[str] = ()  # `train.overlap`
    shares_prompts: bool = False  # responses continue one copy of their prompt
    images: bool = False  # `data.images`
    replays_routes: bool = False  # routers take given experts, which Transformer Engine's fused router cannot


def transformer_config(hf_config: HfConfig, parallel: ParallelSection, options: ModelOptions) -> TransformerConfig:
    """Return Megatron's configuration of this model and layout. Raises ValueError if the GPU lacks the FP8 recipe."""
    fused, fp8 = device.has_transformer_engine(), options.fp8
    # Megatron's default of cuda_graph_modules makes its config class warn on every construction.
    warnings.filterwarnings("ignore", message="full scope is deprecated", module="megatron")
    config = (TransformerConfig if hf_config.mla is None else MLATransformerConfig)(
        hidden_dropout=0.0,
        attention_dropout=0.0,
        deterministic_mode=device.is_deterministic(),
        perform_initialization=options.init_weights,
        params_dtype=options.dtype,
        pipeline_dtype=options.dtype,
        bf16=options.dtype == torch.bfloat16,
        fp16=options.dtype == torch.float16,
        sequence_parallel=options.sequence_parallel,
        calculate_per_token_loss=True,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,  # for Megatron's own linears; `build` sets it for Transformer Engine's
        persist_layer_norm=fused,
        **_recompute_config(hf_config, options.recompute, options.recompute_modules),
        **_shape_config(hf_config),
        **_layout_config(parallel),
        **_fusions_config(hf_config, fused, options.fusions),
        **_windows_config(hf_config),
        **_activation(hf_config, fused, fuses_activation(hf_config, options.fusions)),
        **_experts_config(hf_config, parallel, options.replays_routes),
        **overlap_config(parallel.expert_dispatcher, options.overlap),
        **(_latent_config(hf_config) if hf_config.mla else {}),
        **_recurrent_config(hf_config),
        **(fp8.megatron_config() if fp8 else {}),
    )
    if fp8 is not None:
        halves = hf_config.layers_per_block
        keep_in_bf16(config, (halves * layer + half for layer in fp8.bf16_layers for half in range(halves)))
    # Set after construction: megatron-core 0.19 rejects biases with tensor-parallel experts. `prepare_experts` handles
    # those biases.
    config.add_bias_linear = hf_config.linear_bias
    return config


def _shape_config(hf_config: HfConfig) -> dict[str, Any]:
    """The fields of Megatron's configuration for the sizes and layers that every family has."""
    return dict(
        num_layers=hf_config.num_layers * hf_config.layers_per_block,
        hidden_size=hf_config.hidden_size,
        num_attention_heads=hf_config.num_heads,
        num_query_groups=hf_config.num_kv_heads,
        kv_channels=hf_config.head_dim,
        ffn_hidden_size=hf_config.intermediate_size,
        normalization="LayerNorm" if hf_config.parallel_blocks else "RMSNorm",
        layernorm_zero_centered_gamma=hf_config.centred_norms,
        layernorm_epsilon=hf_config.norm_eps,
        gated_linear_unit=hf_config.gated_mlp,
        add_bias_linear=False,
        add_qkv_bias=hf_config.qkv_bias,
        qk_layernorm=hf_config.qk_norm and not hf_config.wide_qk_norm,
        softmax_scale=hf_config.softmax_scale,
        softmax_type="learnable" if hf_config.sinks else "vanilla",
        init_method_std=hf_config.raw.get("initializer_range", 0.02),
        rotary_interleaved=hf_config.rotary_interleaved,
    )


def _layout_config(parallel: ParallelSection) -> dict[str, Any]:
    """The fields of Megatron's configuration for the layout and its communication."""
    return dict(
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.vpp if parallel.vpp > 1 else None,
        context_parallel_size=parallel.cp,
        cp_comm_type="p2p",  # Transformer Engine's ring attention: keys and values go from rank to rank in a ring
        variable_seq_lengths=True,  # micro-batches differ in length
        # With batched messages and two stages, megatron-core 0.19 swaps two messages to the same peer and trains on
        # wrong activations.
        batch_p2p_comm=parallel.vpp == 1,
        # Unbatched and unoverlapped, two stages that exchange the lengths of their micro-batches deadlock.
        overlap_p2p_comm=parallel.vpp > 1,
        batch_p2p_sync=False,  # True waits for the whole GPU after each message, which only old torch versions need
    )


def fuses_rope(hf_config: HfConfig, fusions: Sequence[str]) -> bool:
    """Whether Transformer Engine rotates queries and keys. Its kernel cannot apply an attention factor."""
    wanted = "rope" in fusions and device.has_transformer_engine()
    scaled = hf_config.rope_type in ("yarn", "longrope")
    return wanted and not scaled and hf_config.rotates_alike and not hf_config.mla


def fuses_activation(hf_config: HfConfig, fusions: Sequence[str]) -> bool:
    """Whether one kernel applies the bias and activation. Without it Megatron's grouped experts drop their bias."""
    return "bias_activation" in fusions or (hf_config.experts is not None and hf_config.linear_bias)


def _fusions_config(hf_config: HfConfig, fused: bool, fusions: Sequence[str]) -> dict[str, Any]:
    """The fields of Megatron's configuration for fused kernels, which exist on GPUs only."""
    return dict(
        apply_rope_fusion=fuses_rope(hf_config, fusions),
        bias_activation_fusion=fused and hf_config.gated_mlp and fuses_activation(hf_config, fusions),
        # Megatron's grouped experts reject this fusion together with biases
        bias_dropout_fusion=fused and not hf_config.linear_bias,
    )


def _latent_config(hf_config: HfConfig) -> dict[str, Any]:
    """Megatron's settings for latent attention. Of the rotary settings it contains only those that scale scores."""
    mla, rotary = hf_config.mla, rope(hf_config.raw)
    assert mla is not None, "the model has no latent attention"
    return dict(
        q_lora_rank=mla.query_rank,
        kv_lora_rank=mla.kv_rank,
        qk_head_dim=mla.nope_dim,
        qk_pos_emb_head_dim=mla.rope_dim,
        v_head_dim=mla.value_dim,
        rope_type="rope",
        rotary_scaling_factor=rotary.get("factor") or 1.0,
        mscale_all_dim=rotary.get("mscale_all_dim") or 0.0,
    )


def _recurrent_config(hf_config: HfConfig) -> dict[str, Any]:
    """The fields of Megatron's configuration for Gated DeltaNet, and for the gate on attention beside it."""
    delta = hf_config.recurrence
    if not isinstance(delta, GatedDelta):
        return dict(attention_output_gate=hf_config.attention_gate)
    return dict(
        attention_output_gate=hf_config.attention_gate,
        linear_num_key_heads=delta.key_heads,
        linear_num_value_heads=delta.value_heads,
        linear_key_head_dim=delta.key_dim,
        linear_value_head_dim=delta.value_dim,
        linear_conv_kernel_dim=delta.kernel,
    )


def _tanh_gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _activation(hf_config: HfConfig, fused: bool, fused_activation: bool) -> dict[str, Any]:
    """The fields of Megatron's configuration for the activation function between an MLP's two linears."""
    if hf_config.experts is not None and hf_config.experts.clamp is not None:
        return dict(
            activation_func=quick_gelu, activation_func_clamp_value=hf_config.experts.clamp, glu_linear_offset=1.0
        )
    if not hf_config.gated_mlp:
        return dict(activation_func={"relu2": squared_relu, "xielu": xielu}[hf_config.activation])
    # True selects the spec's activation module; without Transformer Engine that module is specs.GatedActivation.
    # The fused gelu is the tanh approximation. Megatron and GatedActivation know it by the name F.gelu.
    gelu = _tanh_gelu if fused and not fused_activation else F.gelu
    return dict(activation_func={"silu": F.silu, "gelu": gelu}[hf_config.activation], use_te_activation_func=not fused)


def _windows_config(hf_config: HfConfig) -> dict[str, Any]:
    """The fields of Megatron's configuration for sliding windows: the tokens before its own that a token sees, and the
    hybrid layers with a window."""
    sizes = set(filter(None, hf_config.windows))
    if not sizes or hf_config.chunked:  # `build._set_rotary` sets chunks
        return {}
    (size,) = sizes
    inside = [int(window is not None) for window in hf_config.windows for _ in range(hf_config.layers_per_block)]
    return dict(window_size=(size - 1, 0), window_attn_skip_freq=inside)


def _experts_config(hf_config: HfConfig, parallel: ParallelSection, replays_routes: bool) -> dict[str, Any]:
    """Megatron's settings for a mixture of experts. No token is dropped. The balancing loss is in `router_losses`."""
    experts = hf_config.experts
    if experts is None:
        return {}
    return dict(
        num_moe_experts=experts.count,
        moe_ffn_hidden_size=experts.intermediate_size,
        moe_router_topk=experts.per_token,
        # Softmax over the chosen experts equals softmax over all experts, renormalised to sum to 1.
        moe_router_pre_softmax=not experts.normalized,
        moe_router_score_function="sigmoid" if experts.sigmoid else "softmax",
        moe_router_enable_expert_bias=experts.bias and experts.sigmoid,  # `prepare_experts` adds others
        moe_router_topk_scaling_factor=experts.scale,
        moe_apply_probs_on_input=experts.input_weights,
        moe_shared_expert_intermediate_size=experts.shared_size or None,
        moe_shared_expert_gate=experts.shared_gate,
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="none",
        moe_grouped_gemm=device.has_transformer_engine(),
        **_routing_kernels(own_choice=replays_routes or experts.groups > 1 or experts.softmax_bias),
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=parallel.expert_tp,
    )


def _routing_kernels(own_choice: bool) -> dict[str, Any]:
    """Megatron's settings for fused routing kernels. The fused router takes the highest scores: it cannot choose by
    groups or replay routes."""
    here = device.has_gpu() and device.has_transformer_engine()
    return dict(moe_permute_fusion=here, moe_router_fusion=here and not own_choice)


def keep_in_bf16(config: TransformerConfig, hybrid_layers: Iterable[int]) -> None:
    """Make Megatron skip the FP8 context it enters per layer for these hybrid layers, counted from 0 over all stages.

    Megatron itself only supports a number of first and of last layers.
    """
    config.bf16_layers = frozenset(hybrid_layers)
    fp8_utils.is_first_last_bf16_layer = _in_bf16


def _in_bf16(config: TransformerConfig, layer_no: int) -> bool:
    return layer_no in getattr(config, "bf16_layers", ())
