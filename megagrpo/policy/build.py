"""Builds this rank's part of a Megatron model from a Hugging Face architecture. Every HybridModel is built here."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import unwrap_model
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from megagrpo.config import ProblemError, RunConfig
from megagrpo.families.family_index import FAMILIES
from megagrpo.families.hf_config import HfConfig, model_problems, stage_layers
from megagrpo.families.shared.family import FULL
from megagrpo.platform import device
from megagrpo.platform.parallel.layout import Layout
from megagrpo.policy.attention.causal import Window
from megagrpo.policy.attention.head_norms import UnitNorm
from megagrpo.policy.attention.packed import AxisRotary, NoRotary, Rotary, ScaledRotary, TorchAttention
from megagrpo.policy.attention.sparse import SparseAttention
from megagrpo.policy.blocks.parallel_blocks import join_norms
from megagrpo.policy.fp8.fp8_settings import Fp8
from megagrpo.policy.fp8.products import quantise_linears
from megagrpo.policy.images.trained_tower import attach_tower
from megagrpo.policy.layers.embedding import ScaledEmbedding, TokenEmbedding
from megagrpo.policy.moe.experts import prepare_experts
from megagrpo.policy.transformer.layer_inputs import add_layer_inputs
from megagrpo.policy.transformer.specs import BLOCK_SCALE, layer_pattern, local_spec, transformer_engine_spec
from megagrpo.policy.transformer.transformer_config import ModelOptions, fuses_rope, transformer_config


def build_model(hf_config: HfConfig, layout: Layout, options: ModelOptions) -> list[nn.Module]:
    """Build this rank's chunks of the model, one per virtual pipeline stage, on this rank's device.

    The model's last chunk returns logits [1, T, V/tp] in `options.dtype`, or hidden states in `hidden_states(chunks)`.

    Raises ProblemError when the layout cannot shard the model, ValueError when the GPU does not support the FP8 recipe.
    """
    problems = model_problems(hf_config, layout.parallel)
    if problems:
        raise ProblemError(*problems)
    device.prepare_precision(options.dtype)
    config, fp8 = transformer_config(hf_config, layout.parallel, options), options.fp8
    own_attention = _own_attention(hf_config, layout.parallel.cp, options)
    spec: Callable[[HfConfig], ModuleSpec]
    if device.has_transformer_engine():
        spec = partial(
            transformer_engine_spec,
            own_linears=options.own_linears,
            in_fp8=fp8 is not None,
            own_experts=options.own_experts,
            own_attention=own_attention,
            own_rotation=not fuses_rope(hf_config, options.fusions),
        )
    else:
        spec = local_spec
    # Attention modules rotate queries and keys themselves where angles differ per block or the rotation is not fused.
    rotates_itself = not hf_config.rotates_alike or own_attention
    rotation = "rope" if config.apply_rope_fusion and not rotates_itself else "none"
    chunks = [
        _build_chunk(hf_config, config, layout, chunk, spec(hf_config), rotation)
        for chunk in range(layout.parallel.vpp)
    ]
    for chunk in chunks:
        _set_rotary(chunk, hf_config, options.longest_sequence)
        _accumulate_in_products(chunk)
    if fp8 is not None and not device.has_transformer_engine():
        quantise_linears(chunks, fp8, hf_config.layers_per_block)
    attach_tower(chunks[0], hf_config, options)
    return chunks


def model_options(config: RunConfig, hf_config: HfConfig, dtype: torch.dtype, shares_prompts: bool) -> ModelOptions:
    """Return the options of `build_model` for a run."""
    return ModelOptions(
        dtype=dtype,
        recompute=config.model.recompute,
        recompute_modules=config.model.recompute_modules,
        fusions=config.model.fusions,
        sequence_parallel=config.parallel.sequence_parallel,
        own_linears=config.lora.enabled,
        own_experts=config.lora.in_experts or config.model.base_storage != "none",
        init_weights=config.model.base_storage == "none",
        longest_sequence=config.longest_sequence,
        overlap=config.train.overlap,
        fp8=Fp8.of(config.model, hf_config.num_layers),
        shares_prompts=shares_prompts,
        images=config.data.images,
        replays_routes=config.rollout.routing_replay != "off",
    )


def _own_attention(hf_config: HfConfig, cp: int, options: ModelOptions) -> bool:
    """Whether core attention is `TorchAttention`: without Transformer Engine, or for features its attention lacks.

    These are capped scores, wide heads, keys that an indexer chooses, chunks shorter than the longest sequence, images
    whose tokens see each other, and windows, sinks or shared prompts together with context parallelism. On GPUs before
    Hopper, with sinks on cuDNN before 9.26, in float32, and in deterministic runs, Transformer Engine's attention of
    packs has no fused kernel: it would keep all scores, and has no mask for shared prompts.
    """
    beyond_a_ring = cp > 1 and (any(hf_config.windows) or hf_config.sinks or options.shares_prompts)
    in_float32 = device.has_gpu() and options.dtype == torch.float32
    unfused = device.is_deterministic() or not device.has_packed_attention(hf_config.sinks) or in_float32
    beyond = hf_config.beyond_fused_attention(options.longest_sequence) or beyond_a_ring
    beyond |= options.images and hf_config.vision is not None and hf_config.vision.square is not None
    return not device.has_transformer_engine() or beyond or unfused


def weights_dtype(hf_config: HfConfig) -> torch.dtype:
    """The dtype that holds the weights on disk without loss: bfloat16 for bfloat16, float32 for every other dtype."""
    return torch.bfloat16 if hf_config.dtype == "bfloat16" else torch.float32


def _accumulate_in_products(chunk: nn.Module) -> None:
    """Make Transformer Engine's linears add weight gradients to the float32 `main_grad` inside the product, unrounded.

    Megatron's own linears would need apex for it, so its configuration leaves it off.
    """
    linear: Any
    for linear in chunk.modules():
        if hasattr(linear, "fuse_wgrad_accumulation"):
            linear.fuse_wgrad_accumulation = True


def _build_chunk(
    hf_config: HfConfig, config: TransformerConfig, layout: Layout, chunk: int, spec: ModuleSpec, rotation: str
) -> nn.Module:
    model = HybridModel(
        config,
        spec,
        vocab_size=hf_config.padded_vocab(layout.parallel.tp),
        max_sequence_length=hf_config.max_positions,
        hybrid_layer_pattern=layer_pattern(hf_config, stage_layers(hf_config.num_layers, layout.parallel)),
        pre_process=layout.chunk_is_first(chunk),
        post_process=layout.chunk_is_last(chunk),
        share_embeddings_and_output_weights=hf_config.tied_embeddings,
        position_embedding_type=rotation,
        rotary_base=hf_config.rope_theta,
        rotary_percent=hf_config.partial_rotary_factor,
        pg_collection=layout.process_groups,
        vp_stage=chunk if layout.parallel.vpp > 1 else None,
    )
    prepare_experts(model, hf_config)
    _prepare_sinks(model, config.params_dtype)
    if model.pre_process:
        model.embedding.word_embeddings.__class__ = TokenEmbedding
        if hf_config.embedding_scale != 1:
            model.embedding.__class__, model.embedding.scale = ScaledEmbedding, hf_config.embedding_scale
    if model.post_process:
        model.output_layer.__class__, model.output_layer.cap = LMHead, hf_config.logit_cap
        model.output_layer.scale = hf_config.logit_scale
    if hf_config.layer_inputs:
        add_layer_inputs(model, hf_config.layer_inputs, hf_config.num_layers)
    if hf_config.block_scales:
        _scale_blocks(model, config.params_dtype, hf_config.layers_per_block)
    if hf_config.parallel_blocks:
        join_norms(model)
    if hf_config.residual_scale != 1:
        _scale_outputs(model, hf_config.residual_scale)
    # Fake tensors (only the structure is needed) are created on the target device, because torch cannot move them.
    return model if isinstance(next(model.parameters()), FakeTensor) else model.to(device.device())


def _scale_blocks(model: HybridModel, dtype: torch.dtype, layers_per_block: int) -> None:
    """Multiply the output of every decoder block by a number of its own, a buffer of the block's last layer."""

    def scaled(layer: nn.Module, inputs: Any, outputs: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        return outputs[0] * getattr(layer, BLOCK_SCALE), outputs[1]

    for layer in model.decoder.layers:
        if layer.layer_number % layers_per_block == 0:
            layer.register_buffer(BLOCK_SCALE, torch.ones(1, dtype=dtype, device=torch.cuda.current_device()))
            layer.register_forward_hook(scaled)


def _scale_outputs(model: HybridModel, scale: float) -> None:
    """Multiply the outputs of every attention, recurrent part and MLP by `scale` before the residual sum."""

    def scaled(module: nn.Module, inputs: Any, outputs: tuple[Tensor, Any]) -> tuple[Tensor, None]:
        output, bias = outputs
        assert bias is None, "a bias beside the output would not be scaled"
        return output * scale, None

    for layer in model.decoder.layers:
        for name in ("self_attention", "mixer", "mlp"):
            part = getattr(layer, name, None)
            if isinstance(part, nn.Module) and not isinstance(part, IdentityOp):
                part.register_forward_hook(scaled)


def _prepare_sinks(model: HybridModel, dtype: torch.dtype) -> None:
    """Cast sinks to the model's dtype, which files and vLLM use; Transformer Engine creates them in float32.

    Mark them as sharded over tensor-parallel ranks by head, for the gradient norm and for code that slices tensors.
    """
    for name, parameter in model.named_parameters():
        if name.endswith(".softmax_offset"):
            parameter.data = parameter.data.to(dtype)
            set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)


def _set_rotary(model: HybridModel, hf_config: HfConfig, longest_sequence: int | None) -> None:
    """Give the model the rotary frequencies that transformers computes. HybridModel does not support rope scaling."""
    frequencies, attention_factor = rotary_frequencies(hf_config, longest_sequence)
    rotary = Rotary(frequencies.to(device.device()), attention_factor, hf_config.rotary_interleaved)
    if hf_config.vision is not None and hf_config.vision.axes:
        rotary = AxisRotary(rotary, torch.tensor(hf_config.vision.axes, device=device.device()))
    local = rotary
    if hf_config.local_rope_theta:
        local = Rotary(_unscaled(hf_config.rotary_dim, hf_config.local_rope_theta).to(device.device()))
    unit = UnitNorm(hf_config.norm_eps)
    for layer in model.decoder.layers:
        attention: Any = getattr(layer, "self_attention", None)
        core = getattr(attention, "core_attention", None)
        turning: Any = attention if hf_config.mla else core
        if hasattr(turning, "rotary"):
            block = (layer.layer_number - 1) // hf_config.layers_per_block
            turning.rotary = local if hf_config.window(block) else rotary
            if block in hf_config.unrotated:
                turning.rotary = NoRotary()
            elif hf_config.unit_qk_norm:
                turning.rotary = turning.rotary.with_norms(unit, unit)
            if hf_config.late_qk_norm:
                turning.rotary = turning.rotary.with_norms(attention.q_layernorm, attention.k_layernorm)
            if (scale := hf_config.query_scale) is not None and block in scale.blocks:
                turning.rotary = ScaledRotary(turning.rotary, scale)
        if isinstance(core, SparseAttention):
            pairs = hf_config.indexer is not None and hf_config.indexer.interleaved
            core.indexer.rotary = Rotary(rotary.frequencies, rotary.factor, pairs)
        if isinstance(core, TorchAttention):
            core.softcap = hf_config.score_cap
            if hf_config.chunked and (size := hf_config.window((layer.layer_number - 1) // hf_config.layers_per_block)):
                core.window = Window(size, chunked=True)
    for module in model.modules():
        if hasattr(module, "_yarn_concentration_factor"):
            module._yarn_concentration_factor = attention_factor
    if model.position_embedding_type == "rope":
        model.rotary_pos_emb.inv_freq = rotary.frequencies
        model.rotary_pos_emb.rotary_interleaved = hf_config.rotary_interleaved  # HybridModel does not pass this on


def rotary_frequencies(hf_config: HfConfig, longest_sequence: int | None = None) -> tuple[Tensor, float]:
    """Return inverse frequencies [rotary_dim / 2] float32 and the factor on cos and sin, from transformers' own
    function for each rope type.

    Under longrope they depend on whether sequences may be longer than in pretraining. As in vLLM, `longest_sequence`,
    the longest sequence that may occur, decides for all sequences: vLLM's key cache must stay valid while a sequence
    grows. transformers decides for every batch separately.
    """
    if hf_config.rope_type == "default":
        return _unscaled(global_rotary_dim(hf_config), hf_config.rope_theta), 1.0
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    # A family's model_type may be an alias that transformers does not know. transformers knows the family's model
    # class.
    kinds = {name: kind for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()}

    arguments = {k: v for k, v in hf_config.raw.items() if k != "model_type"}
    kind = {} if hf_config.local_rope_theta is None else dict(layer_type=FULL)
    theirs = AutoConfig.for_model(kinds[FAMILIES[hf_config.family].architecture], **arguments)
    frequencies, factor = ROPE_INIT_FUNCTIONS[hf_config.rope_type](theirs, seq_len=longest_sequence, **kind)
    return frequencies, float(factor)


def global_rotary_dim(hf_config: HfConfig) -> int:
    """Return the number of rotated dimensions of a head in blocks without a window."""
    own = hf_config.global_heads
    return hf_config.rotary_dim if own is None else replace(hf_config, head_dim=own.head_dim).rotary_dim


def _unscaled(head_dim: int, theta: float) -> Tensor:
    return 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)


class LMHead(ColumnParallelLinear):
    """The output layer, with a switch that returns its input in place of logits.

    With `stand_aside` the caller multiplies the input by the weight itself, in chunks. The layer still runs in the
    forward pass, so DDP's hooks on its weight still run. With a `cap`, logits x become cap tanh(x / cap).
    """

    stand_aside = False
    cap: float | None = None
    scale = 1.0  # factor on the logits; `head_input` has applied it where the caller multiplies

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return (logits [T, 1, V/tp], bias) of input [T, 1, H], or (input, None) with `stand_aside`."""
        if self.stand_aside:
            return input_, None
        input_ = input_ if self.scale == 1 else input_ * self.scale
        logits, bias = super().forward(input_, weight=weight, runtime_gather_output=runtime_gather_output)
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap), bias


@contextlib.contextmanager
def hidden_states(chunks: list[nn.Module]) -> Iterator[None]:
    """Context manager: the last stage's forward returns hidden states after the final norm, [1, T, H], not logits.

    Under sequence parallelism a rank gets its rows, [1, T/tp, H]; `head_input` makes both forms whole. Not reentrant.
    """
    heads = [model.output_layer for model in map(unwrap_model, chunks) if hasattr(model, "output_layer")]
    for head in heads:
        head.stand_aside = True
    try:
        yield
    finally:
        for head in heads:
            head.stand_aside = False


def lm_head(chunk: nn.Module) -> Tensor:
    """Return the LM head's weight [V/tp, H] of the last chunk; if tied on the same stage, the embedding's weight."""
    model = unwrap_model(chunk)
    return (
        model.shared_embedding_or_output_weight()
        if model.share_embeddings_and_output_weights
        else model.output_layer.weight
    )


def logit_scale(chunk: nn.Module) -> float:
    """Return the factor on the logits of the last chunk, which `head_input` applies."""
    return float(unwrap_model(chunk).output_layer.scale)


def head_input(chunk: nn.Module, hidden: Tensor) -> Tensor:
    """Return hidden states [T, H] of the whole micro-batch from the output of a forward pass inside `hidden_states`,
    with the factor on the logits.

    The backward pass all-reduces the gradient over the tensor-parallel ranks, because each rank's gradient covers its
    V/tp logits only.
    The head's own backward must therefore not all-reduce it a second time.
    """
    model = unwrap_model(chunk)
    group, rows = model.pg_collection.tp, hidden.flatten(0, 1)
    rows = rows if model.output_layer.scale == 1 else rows * model.output_layer.scale
    if model.config.sequence_parallel:
        return gather_from_sequence_parallel_region(rows, tensor_parallel_output_grad=True, group=group)
    return copy_to_tensor_model_parallel_region(rows, group=group)
