"""The all-to-alls of experts beside the computation of another micro-batch (`train.overlap: [experts]`).

Megatron's combined 1F1B schedule runs the forward pass of one micro-batch and the backward pass of another layer by
layer, and needs the parts of each layer. megatron-core 0.19.2 finds them for GPTModel only; the classes here find them
for HybridModel. They can go when HybridModel has `build_schedule_plan`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from megatron.core.models.common.model_chunk_schedule_plan import (
    TransformerLayerSchedulePlan,
    TransformerModelChunkSchedulePlan,
)
from megatron.core.models.common.utils import PostProcessNode, PreProcessNode, TransformerLayerNode
from megatron.core.models.gpt.fine_grained_callables import build_transformer_layer_callables
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel.utils import NoopScheduleNode, ScheduleNode
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor, nn

from megagrpo.policy.layers.megatron_modules import decoder_of, layers_of, mix_in
from megagrpo.policy.moe.routing_replay import later
from megagrpo.policy.transformer.specs import LAYERS_PER_BLOCK


def plan_chunks(chunks: Sequence[nn.Module]) -> None:
    """Let Megatron's combined schedule run these bare chunks."""
    for chunk in chunks:
        mix_in(chunk, Planned)
        decoder_of(chunk).final_layernorm = None  # read by Megatron's last layer; `_Head` applies HybridStack's
        for layer in layers_of([chunk]):
            if not hasattr(layer.self_attention, "backward_dw"):
                layer.self_attention.backward_dw = _nothing  # a layer without attention has no weight gradients of it


def _nothing() -> None:
    return None


class Planned:
    """A HybridModel that Megatron's combined schedule can run."""

    def build_schedule_plan(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None,
        packed_seq_params: PackedSeqParams | None = None,
        padding_mask: Tensor | None = None,
    ) -> TransformerModelChunkSchedulePlan:
        """Return the plan of a forward pass, with the arguments of `forward`."""
        state = dict(packed_seq_params=packed_seq_params, padding_mask=padding_mask)
        return _ChunkPlan(self, input_ids, position_ids, attention_mask, **state)


class _Embedding(PreProcessNode):
    """Embeds the tokens, or takes the hidden states of the stage before."""

    def forward_impl(self) -> Tensor:
        state, model = self.chunk_state, self.model
        state.rotary_pos_cos = state.rotary_pos_sin = state.sequence_len_offset = state.rotary_pos_emb = None
        if model.position_embedding_type == "rope" and not model.config.multi_latent_attention:
            rotary, pack = model.rotary_pos_emb, state.packed_seq_params
            length = rotary.get_rotary_seq_len(None, model.decoder, None, model.config, pack)
            state.rotary_pos_emb = rotary(length, packed_seq=True)
        if model.pre_process:
            return model.embedding(input_ids=state.input_ids, position_ids=state.position_ids)
        return model.decoder.input_tensor


class _Head(PostProcessNode):
    """The final norm and the LM head, in the precision of the model."""

    def forward_impl(self, hidden_states: Tensor) -> Tensor:
        model = self.model
        tied = model.share_embeddings_and_output_weights
        weight = model.shared_embedding_or_output_weight() if tied else None
        logits, _ = model.output_layer(model.decoder.final_norm(hidden_states), weight=weight)
        return logits.transpose(0, 1).contiguous()


class _BlockPlan(TransformerLayerSchedulePlan):
    """The parts of a decoder block: attention up to the dispatch, dispatch, experts, combine. HybridModel has a block
    as two layers; planned one by one, half of the messages would have no computation beside them."""

    def __init__(self, layers: Sequence[Any], *streams: Any, last: bool):
        self._attention = layers[0]
        super().__init__(layers[1], *streams, {"is_last_layer": last})

    def _build_callable_nodes(self, event: Any, comp_stream: Any, comm_stream: Any, extra_args: dict[str, Any]) -> None:
        attention, mlp, state = self._attention, self.layer, (self.layer_state, self.chunk_state)
        mixed = isinstance(mlp.mlp, MoELayer)
        (before_dispatch, *rest, _), delayed = build_transformer_layer_callables(mlp)
        delayed["pre_dispatch_computation"] = [attention.self_attention, delayed["pre_dispatch_computation"]]
        extra_args |= dict(config=mlp.config, is_moe=mixed, num_local_experts=mixed and mlp.mlp.num_local_experts)
        extra_args["delay_wgrad_compute"] = mlp.config.delay_wgrad_compute
        # The plan is made inside the micro-batch's forward step and runs later, beside other micro-batches.
        replaying = later(mlp.mlp.router) if mixed else nullcontext

        def until_dispatch(node: ScheduleNode, hidden_states: Tensor) -> Any:
            pack, rotary = node.chunk_state.packed_seq_params, node.chunk_state.rotary_pos_emb
            hidden_states, _ = attention(
                hidden_states=hidden_states, attention_mask=None, packed_seq_params=pack, rotary_pos_emb=rotary
            )
            masked = mlp.mlp.router.masking(node.chunk_state.padding_mask) if mixed else nullcontext()
            with replaying(), masked:
                return before_dispatch(node, hidden_states)

        names = ("pre_dispatch_computation", "moe_dispatch", "mlp", "moe_combine")
        for name, part in zip(names, (until_dispatch, *rest), strict=True):
            communicates = name in ("moe_dispatch", "moe_combine")
            stream = comm_stream if communicates else comp_stream
            arguments = dict(name=name, bwd_dw_callables=delayed.get(name), extra_args=extra_args)
            node = TransformerLayerNode(stream, event, *state, part, **arguments)
            setattr(self, name, node if mixed or not communicates else NoopScheduleNode())
        self.mtp_post_process = NoopScheduleNode()


class _ChunkPlan(TransformerModelChunkSchedulePlan):
    """The plan of a chunk's forward pass, block by block."""

    PRE_PROCESS_NODE_CLASS, POST_PROCESS_NODE_CLASS = _Embedding, _Head

    def _build_layer_schedule_plan(self, module: Any, comp_stream: Any, comm_stream: Any) -> None:
        layers = [] if module is None else list(module.layers)  # None: the chunk predicts no further tokens
        for start in range(0, len(layers), LAYERS_PER_BLOCK):
            stop, streams = start + LAYERS_PER_BLOCK, (self.event, self.state, comp_stream, comm_stream)
            self._transformer_layers.append(_BlockPlan(layers[start:stop], *streams, last=stop == len(layers)))
