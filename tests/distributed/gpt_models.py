"""GPTModels of megatron-core, and Megatron-LM's own functions that save and load them."""

from __future__ import annotations

import ast
import inspect
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megagrpo.config import ParallelSection
from megagrpo.families.hf_config import HfConfig, load_hf_config
from megagrpo.platform.parallel.layout import Layout, init_layout
from megagrpo.policy.attention.packed import TorchAttention
from megagrpo.policy.transformer.transformer_config import ModelOptions, transformer_config


def linear_with_norm() -> type:
    """A linear whose output is normalised, with the keys of the layer specs of Megatron-Bridge's Gemma."""
    from megatron.core.tensor_parallel.layers import RowParallelLinear
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    class LinearWithNorm(RowParallelLinear):
        def __init__(self, input_size: int, output_size: int, *, config: Any, **options: Any):
            super().__init__(input_size, output_size, config=config, **options)
            self.post_layernorm = WrappedTorchNorm(config, output_size, config.layernorm_epsilon)

    return LinearWithNorm


def gpt_model(
    hf_config: HfConfig, layout: Layout, padded_vocab: int, dtype: torch.dtype = torch.bfloat16
) -> list[nn.Module]:
    """This rank's chunk of a GPTModel with random linears and embeddings."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    options = ModelOptions(dtype=dtype)
    config = transformer_config(hf_config, layout.parallel, options)
    config.num_layers, config.use_te_activation_func = hf_config.num_layers, False
    config.layernorm_zero_centered_gamma = False  # which torch's norm lacks; it changes no weight and no key
    if hf_config.experts:
        config.moe_layer_freq = [int(hf_config.has_experts(block)) for block in range(hf_config.num_layers)]
        if all(config.moe_layer_freq):
            config.moe_layer_freq = 1
        config.qk_layernorm |= hf_config.mla is not None  # of the latents
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
        if hf_config.mla:  # Megatron's own core attention, which has no weights, takes no values of another width
            for layer in spec.layer_specs:
                layer.submodules.self_attention.submodules.core_attention = TorchAttention
    else:
        spec = get_gpt_layer_local_spec(qk_layernorm=hf_config.qk_norm, normalization="RMSNorm")
        if hf_config.post_norms:
            spec.submodules.self_attention.submodules.linear_proj = linear_with_norm()
            spec.submodules.mlp.keywords["submodules"].linear_fc2 = linear_with_norm()
    model = GPTModel(
        config,
        spec,
        vocab_size=padded_vocab,
        max_sequence_length=hf_config.max_positions,
        pre_process=layout.chunk_is_first(0),
        post_process=layout.chunk_is_last(0),
        share_embeddings_and_output_weights=hf_config.tied_embeddings,
        position_embedding_type="rope",
        pg_collection=layout.process_groups,
    )
    return [model.to(dtype)]


def arguments(folder: Path, hf_config: HfConfig, layout: Layout, **more: Any) -> Namespace:
    """Megatron-LM's arguments. Those that saving and loading read and that these tests leave out are None."""
    from megatron.training import checkpointing

    nodes = ast.walk(ast.parse(inspect.getsource(checkpointing)))
    names = [node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)]
    read = {node.attr for node in names if node.value.id == "args"}
    sizes = layout.parallel
    named: dict[str, Any] = dict(
        save=str(folder),
        load=str(folder),
        ckpt_format="torch_dist",
        use_dist_ckpt=True,
        auto_detect_ckpt_format=False,
        tensor_model_parallel_size=sizes.tp,
        pipeline_model_parallel_size=sizes.pp,
        world_size=layout.world_size,
        num_layers=hf_config.num_layers,
        hidden_size=hf_config.hidden_size,
        num_attention_heads=hf_config.num_heads,
        group_query_attention=True,
        num_query_groups=hf_config.num_kv_heads,
        kv_channels=hf_config.head_dim,
        add_position_embedding=True,
        norm_epsilon=hf_config.norm_eps,
        rotary_base=int(hf_config.rope_theta),
        swiglu=hf_config.activation == "silu",
        num_experts=hf_config.experts and hf_config.experts.count,
        untie_embeddings_and_output_weights=not hf_config.tied_embeddings,
        no_save_optim=True,
        no_save_rng=True,
        no_load_optim=True,
        no_load_rng=True,
        dist_ckpt_strictness="assume_ok_unexpected",
        ckpt_load_validate_sharding_integrity=True,
        ckpt_fully_parallel_save=False,
        async_strategy="mcore",
    )
    return Namespace(**(dict.fromkeys(read) | named | more))


def save(
    folder: Path, hf_config: HfConfig, layout: Layout, model: list[nn.Module], iteration: int, **more: Any
) -> None:
    """Save as Megatron-LM's training does; `more` are arguments of Megatron-LM."""
    from megatron.training import checkpointing, global_vars

    global_vars.set_args(arguments(folder, hf_config, layout, **more))
    folder.mkdir(exist_ok=True)
    checkpointing.save_checkpoint(iteration, model, None, None, 0)


def load(folder: Path, hf_config: HfConfig, layout: Layout, model: list[nn.Module]) -> int:
    """Load as Megatron-LM's training does, and return the iteration."""
    from megatron.core import num_microbatches_calculator
    from megatron.training import checkpointing, global_vars

    global_vars.set_args(arguments(folder, hf_config, layout))
    num_microbatches_calculator.unset_num_microbatches_calculator()
    num_microbatches_calculator.init_num_microbatches_calculator(layout.world_rank, None, 1, 1, 1, False)
    return checkpointing.load_checkpoint(model, None, None)[0]


def start(folder: Path, sizes: dict[str, Any]) -> tuple[HfConfig, Layout]:
    """The architecture of a folder, and a layout of all ranks."""
    return load_hf_config(folder), init_layout(ParallelSection(**sizes))
