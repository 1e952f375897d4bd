"""The table of a Llama-like decoder, which most families share, and optional parts of it. Imports no torch."""

from __future__ import annotations

from megagrpo.families.shared.blocks import gated, qkv, same, vocab
from megagrpo.families.shared.family import Table

EMBEDDING = "embedding.word_embeddings.weight"
HEAD = "output_layer.weight"

LAYER = "model.layers.{L}."
ATTENTION = LAYER + "self_attn."
MLP = LAYER + "mlp."

# Transformer Engine keeps a norm inside the next linear, so two keys stand for one tensor.
DENSE: Table = {
    EMBEDDING: vocab("model.embed_tokens.weight"),
    HEAD: vocab("lm_head.weight"),
    "decoder.final_norm.weight": same("model.norm.weight"),
    "input_layernorm.weight": same(LAYER + "input_layernorm.weight"),
    "self_attention.linear_qkv.layer_norm_weight": same(LAYER + "input_layernorm.weight"),
    "self_attention.linear_qkv.weight": qkv(ATTENTION + "{p}_proj.weight"),
    "self_attention.linear_proj.weight": same(ATTENTION + "o_proj.weight"),
    "pre_mlp_layernorm.weight": same(LAYER + "post_attention_layernorm.weight"),
    "mlp.linear_fc1.layer_norm_weight": same(LAYER + "post_attention_layernorm.weight"),
    "mlp.linear_fc1.weight": gated(MLP + "gate_proj.weight", MLP + "up_proj.weight"),
    "mlp.linear_fc2.weight": same(MLP + "down_proj.weight"),
}
# The same decoder with norms on the outputs of attention and MLP in place of their inputs.
_INPUT_NORMS = ("input_layernorm.weight", "pre_mlp_layernorm.weight")
POST_NORMED: Table = {
    key: rule for key, rule in DENSE.items() if not key.endswith(("layer_norm_weight", *_INPUT_NORMS))
}
POST_NORMED |= {
    "self_attention.post_norm.weight": same(LAYER + "post_attention_layernorm.weight"),
    "mlp.post_norm.weight": same(LAYER + "post_feedforward_layernorm.weight"),
}
UNGATED: Table = {"mlp.linear_fc1.weight": same(MLP + "up_proj.weight")}
FUSED = MLP + "gate_up_proj.weight"
GATE_UP: Table = {"mlp.linear_fc1.weight": gated(FUSED, FUSED)}
QKV_BIAS: Table = {"self_attention.linear_qkv.bias": qkv(ATTENTION + "{p}_proj.bias")}
QK_NORM: Table = {
    "self_attention.q_layernorm.weight": same(ATTENTION + "q_norm.weight"),
    "self_attention.k_layernorm.weight": same(ATTENTION + "k_norm.weight"),
}
# For `Family.fixed`: the keys about such norms.
HAS_HEAD_NORMS = dict.fromkeys(
    ("use_qk_norm", "qk_norm", "qk_layernorm"), (True, "this family normalises queries and keys")
)

# The projections of an MLP that every token takes beside its experts, and of experts whose file has one tensor per
# projection and expert.
GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")


def shared_experts(folder: str) -> Table:
    """The MLP for every token beside the experts, under `folder` of a block's MLP in Hugging Face's names."""
    gate, up, down = (f"{MLP}{folder}.{name}.weight" for name in GATE_UP_DOWN)
    return {"mlp.shared_experts.linear_fc1.weight": gated(gate, up), "mlp.shared_experts.linear_fc2.weight": same(down)}


SHARED_GATE: Table = {"mlp.shared_experts.gate_weight": same(MLP + "shared_expert_gate.weight")}
EXPERT_BIAS: Table = {"mlp.router.expert_bias": same(MLP + "gate.e_score_correction_bias")}


def experts(folder: str, gate: str, up: str, down: str) -> Table:
    """The router and every expert, one tensor per projection and expert, under `folder` as in Hugging Face's names."""
    each = f"{LAYER}{folder}.experts.{{E}}."
    return {
        "mlp.router.weight": same(f"{LAYER}{folder}.gate.weight"),
        "mlp.experts.linear_fc1.weight": gated(f"{each}{gate}.weight", f"{each}{up}.weight"),
        "mlp.experts.linear_fc2.weight": same(f"{each}{down}.weight"),
    }


USUAL_EXPERTS: Table = experts("mlp", *GATE_UP_DOWN)
GATED_SHARED_EXPERT: Table = shared_experts("shared_expert") | SHARED_GATE
