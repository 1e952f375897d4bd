"""GPT-OSS in layouts: each rank of an expert or projection holds the whole bias, and sinks are sharded by head."""

import functools

import pytest
import torch
from ranks import run_ranks
from suites import usual
from tiny_policy import Case

from megagrpo.config import ParallelSection
from megagrpo.families.hf_config import HfConfig
from megagrpo.platform.parallel.layout import init_layout
from megagrpo.policy.attention.packed import TorchAttention
from megagrpo.policy.build import build_model
from megagrpo.policy.transformer.transformer_config import ModelOptions
from megagrpo.proof.verify.shrink import random_samples, random_tensor, shrink_model
from megagrpo.proof.verify.verified_step import Outcome, take_step
from megagrpo.proof.verify.verify_compare import compare, silent_tensors

# The relevant part of gpt-oss-20b's config.json.
RAW = dict(
    model_type="gpt_oss",
    num_hidden_layers=24,
    hidden_size=2880,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=64,
    intermediate_size=2880,
    num_local_experts=32,
    num_experts_per_tok=4,
    vocab_size=201088,
    tie_word_embeddings=False,
    rms_norm_eps=1e-5,
    sliding_window=128,
    layer_types=["sliding_attention", "full_attention"] * 12,
    rope_theta=150000,
    rope_scaling=dict(
        rope_type="yarn",
        factor=32.0,
        beta_fast=32.0,
        beta_slow=1.0,
        truncate=False,
        original_max_position_embeddings=4096,
    ),
    swiglu_limit=7.0,
    attention_bias=True,
)
TP2 = dict(tp=2, sequence_parallel=True)
LAYOUTS = [
    Case("tp2_ep2_etp1", 2, TP2 | dict(ep=2, etp=1)),
    Case("tp2_cp2_etp2_shared", 4, TP2 | dict(cp=2), dict(share_prompts=True)),
]
MORE = [
    Case("tp2_etp2", 2, TP2),
    Case("tp2_ep2_etp2_sharded", 4, TP2 | dict(ep=2, etp=2), dict(distributed_optimizer=True)),
    Case("etp2", 2, dict(etp=2)),
    Case("ep2", 2, dict(ep=2)),
    Case("pp2", 2, dict(pp=2)),
    Case("cp2", 2, dict(cp=2)),
]


def model() -> HfConfig:
    return shrink_model(RAW, ParallelSection(tp=2, pp=2, ep=2, etp=2))


def wide(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Random weights that clamp some activations of the experts."""
    return random_tensor(name, shape) * (10 if name.endswith("gate_up_proj") else 1)


def step(case: Case) -> Outcome:
    return run_ranks(take_step, case.ranks, case.config(), model(), random_samples(), wide)[0]


@functools.cache
def one_process() -> Outcome:
    return step(Case("one process", 1, {}))


def test_every_bias_and_every_sink_has_a_gradient():
    assert silent_tensors(one_process()) == []
    kinds = {name.split(".", 3)[3] for name in one_process().gradients if name.startswith("model.layers.")}
    assert {"self_attn.sinks", "self_attn.o_proj.bias", "mlp.router.bias", "mlp.experts.down_proj_bias"} < kinds


def sinks_made_in_float32() -> list[tuple[torch.dtype, bool, int]]:
    """Dtype and marks of the sinks of a bfloat16 model, where attention makes float32 sinks, as Transformer Engine's
    does."""
    begin = TorchAttention.__init__

    def make(self, *args, **kwargs):
        begin(self, *args, **kwargs)
        self.softmax_offset = torch.nn.Parameter(self.softmax_offset.data.float())

    TorchAttention.__init__ = make
    chunks = build_model(model(), init_layout(ParallelSection()), ModelOptions(dtype=torch.bfloat16))
    sinks = [p for chunk in chunks for name, p in chunk.named_parameters() if name.endswith("softmax_offset")]
    return [(p.dtype, p.tensor_model_parallel, p.partition_dim) for p in sinks]


def test_sinks_built_in_float32_get_the_dtype_of_all_weights():
    found = run_ranks(sinks_made_in_float32, 1)[0]
    assert set(found) == {(torch.bfloat16, True, 0)} and len(found) == model().num_layers


@pytest.mark.parametrize("case", usual([*LAYOUTS, *MORE], 0), ids=str)
def test_every_layout_takes_the_step_of_one_process(case):
    assert [d for d in compare(step(case), one_process()) if not d.passed] == []
