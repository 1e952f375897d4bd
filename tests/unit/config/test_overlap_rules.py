"""Each rule of `train.overlap` and `parallel.expert_dispatcher` names its key, and allowed values load."""

import pytest

from megagrpo.config import ConfigError, load_config
from tests.unit.for_each import for_each

ALLOWED = [
    ["train.overlap=[param_gather]", "algorithm.steps_per_generation=2", "train.distributed_optimizer=true"],
    ["train.overlap=[tp]", "parallel.tp=3", "parallel.sequence_parallel=true"],
    ["train.overlap=[experts,weight_gradients]", "parallel.ep=2"],
    ["train.overlap=[experts]", "parallel.ep=2", "parallel.pp=2", "parallel.vpp=2"],
    ["train.overlap=[shared_experts,weight_gradients]", "parallel.ep=2", "model.recompute=full"],
    ["parallel.expert_dispatcher=deepep", "parallel.ep=8"],
    ["parallel.expert_dispatcher=hybridep", "parallel.ep=3"],
]
REFUSED = [  # overrides, and the beginning of the problem
    (["train.overlap=[param_gather]"], "train.overlap: param_gather has no effect: the weight sync after"),
    (
        ["train.overlap=[param_gather]", "algorithm.steps_per_generation=2", "train.distributed_optimizer=false"],
        "train.overlap: param_gather needs train.distributed_optimizer",
    ),
    (
        ["train.overlap=[param_gather]", "algorithm.steps_per_generation=2", "train.overlap_grad_reduce=false"],
        "train.overlap: param_gather needs the buckets of train.overlap_grad_reduce",
    ),
    (["train.overlap=[tp]"], "train.overlap: tp needs parallel.tp > 1 with parallel.sequence_parallel"),
    (
        ["train.overlap=[tp]", "parallel.tp=3", "parallel.sequence_parallel=true", "lora.rank=4"],
        "train.overlap: tp needs Transformer Engine's linears",
    ),
    (
        ["train.overlap=[tp]", "parallel.tp=3", "parallel.sequence_parallel=true", "model.fp8_recipe=blockwise"],
        "train.overlap: tp gathers bf16 only, but model.fp8_recipe is blockwise",
    ),
    (
        ["train.overlap=[tp]", "parallel.tp=3", "parallel.sequence_parallel=true", "model.precision=fp32"],
        "train.overlap: tp needs bf16",
    ),
    (["train.overlap=[experts]"], "train.overlap: experts needs parallel.ep > 1"),
    (["train.overlap=[experts]", "parallel.ep=2", "parallel.pp=2"], "train.overlap: experts needs virtual stages"),
    (
        ["train.overlap=[experts]", "parallel.ep=2", "model.recompute=full"],
        "train.overlap: experts does not support recomputed experts",
    ),
    (
        ["train.overlap=[experts]", "parallel.ep=2", "model.recompute=selective", "model.recompute_modules=[moe]"],
        "train.overlap: experts does not support recomputed experts",
    ),
    (["train.overlap=[experts]", "parallel.ep=2", "model.precision=fp32"], "train.overlap: experts needs bf16"),
    (["train.overlap=[experts,shared_experts]", "parallel.ep=2"], "train.overlap: experts already runs shared experts"),
    (
        ["train.overlap=[experts]", "parallel.ep=2", "model.offload_activations=0.5"],
        "train.overlap: experts calls parts of layers, which offloading cannot track",
    ),
    (
        ["train.overlap=[experts]", "parallel.ep=2", "model.fp8_recipe=blockwise"],
        "train.overlap: experts calls parts of layers, outside the FP8 of blockwise",
    ),
    (
        ["train.overlap=[experts]", "parallel.ep=2", "lora.rank=4"],
        "train.overlap: experts is not supported with adapters",
    ),
    (
        ["train.overlap=[shared_experts]", "model.recompute=selective", "model.recompute_modules=[shared_experts]"],
        "train.overlap: shared_experts cannot recompute shared experts alone",
    ),
    (["train.overlap=[shared_experts]", "lora.rank=4"], "train.overlap: shared_experts is not supported with adapters"),
    (["train.overlap=[weight_gradients]"], "train.overlap: weight_gradients needs parallel.ep > 1"),
    (
        ["train.overlap=[weight_gradients]", "parallel.ep=2", "lora.rank=4"],
        "train.overlap: weight_gradients has no effect with adapters",
    ),
    (["parallel.expert_dispatcher=hybridep"], "parallel.expert_dispatcher: hybridep has nothing to send"),
    (
        ["parallel.expert_dispatcher=deepep", "parallel.ep=3"],
        "parallel.expert_dispatcher: deepep supports groups of 2, 4, 8, 16, 24, 32, 64, 128, 144, 160 ranks",
    ),
    (
        ["parallel.expert_dispatcher=deepep", "parallel.ep=2", "model.precision=fp32"],
        "parallel.expert_dispatcher: deepep sends bf16 only",
    ),
]


@pytest.mark.parametrize("overrides", ALLOWED, ids=" ".join)
def test_what_megatron_allows_loads(overrides):
    load_config("megagrpo:quickstart", ["model.precision=auto", *overrides])


@for_each(("overrides", "problem"), REFUSED)
def test_what_cannot_overlap_is_refused_with_its_reason(overrides, problem):
    with pytest.raises(ConfigError) as raised:
        load_config("megagrpo:quickstart", ["model.precision=auto", *overrides])
    assert problem in str(raised.value)


def test_every_micro_batch_has_the_same_length_with_userbuffers():
    layout = ["parallel.tp=3", "parallel.sequence_parallel=true", "train.max_tokens_per_micro_batch=1000"]
    overlapped, plain = (
        load_config("megagrpo:quickstart", [*layout, "model.precision=bf16", f"train.overlap={overlap}"])
        for overlap in ("[tp]", "[]")
    )
    assert overlapped.micro_batch_align == 999 and plain.micro_batch_align == 3
    assert overlapped.without_overlap.micro_batch_align == 3
