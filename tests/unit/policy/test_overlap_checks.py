"""What `train.overlap` and `parallel.expert_dispatcher` make of Megatron's configuration, and what a machine lacks."""

import sys
from types import ModuleType

import pytest
import torch
from tiny_policy import tiny_model

from megagrpo.config import ParallelSection, TrainSection
from megagrpo.platform import device
from megagrpo.policy.transformer.message_overlap import check_overlap
from megagrpo.policy.transformer.transformer_config import ModelOptions, transformer_config

TWO = ParallelSection(ep=2)


def megatron(overlap: list[str], parallel: ParallelSection = TWO, **options):
    made = ModelOptions(dtype=options.pop("dtype", torch.bfloat16), overlap=overlap, **options)
    return transformer_config(tiny_model("qwen3_moe"), parallel, made)


def test_each_overlap_is_one_setting_of_megatron():
    plain, delayed, beside = megatron([]), megatron(["experts", "weight_gradients"]), megatron(["experts"])
    names = ("tp_comm_overlap", "moe_shared_expert_overlap", "overlap_moe_expert_parallel_comm", "delay_wgrad_compute")
    assert not any(getattr(plain, name) for name in names)
    assert beside.overlap_moe_expert_parallel_comm and not beside.delay_wgrad_compute and delayed.delay_wgrad_compute
    assert plain.moe_token_dispatcher_type == "alltoall"
    for name in ("deepep", "hybridep"):
        made = megatron([], ParallelSection(ep=2, expert_dispatcher=name))
        assert (made.moe_token_dispatcher_type, made.moe_flex_dispatcher_backend) == ("flex", name)
        assert made.moe_hybridep_pad_uneven_dispatch_inputs == (name == "hybridep")


@pytest.mark.parametrize(
    ("parallel", "options"),
    [
        (ParallelSection(), {}),
        (ParallelSection(pp=2, ep=2), {}),
        (TWO, dict(recompute="full")),
        (TWO, dict(recompute="selective", recompute_modules=["moe"])),
        (TWO, dict(dtype=torch.float32)),
    ],
    ids=["one rank", "no virtual stages", "full recompute", "recomputed experts", "float32"],
)
def test_megatron_still_excludes_what_the_config_refuses(parallel, options):
    """A rule of `overlap_rules` can go when this fails."""
    with pytest.raises(AssertionError):
        megatron(["experts"], parallel, **options)


def test_megatron_still_excludes_shared_experts_beside_experts():
    with pytest.raises(AssertionError, match="disable moe_shared_expert_overlap"):
        megatron(["experts", "shared_experts"])


def refusal(overlap: list[str] = (), dispatcher: str = "alltoall", dtype: torch.dtype = torch.bfloat16) -> str:
    with pytest.raises(ValueError) as raised:
        check_overlap(TrainSection(overlap=list(overlap)), ParallelSection(expert_dispatcher=dispatcher), dtype)
    return str(raised.value)


def test_a_machine_says_what_it_lacks(monkeypatch):
    for name in ("tp", "weight_gradients"):
        assert refusal([name]).startswith(f"train.overlap: {name} needs Transformer Engine")
    assert refusal(["experts"], dtype=torch.float32).startswith("train.overlap: experts needs bf16")
    assert refusal(dispatcher="deepep").startswith("parallel.expert_dispatcher: deepep needs GPUs")
    monkeypatch.setattr(device, "has_gpu", lambda: True)
    assert refusal(dispatcher="deepep", dtype=torch.float32).startswith(
        "parallel.expert_dispatcher: deepep sends bf16 only"
    )
    assert "deepep needs the package deep_ep, which is not installed" in refusal(dispatcher="deepep")
    package = ModuleType("deep_ep")
    package.Buffer, package.__spec__ = object, object()
    monkeypatch.setitem(sys.modules, "deep_ep", package)
    check_overlap(TrainSection(), ParallelSection(expert_dispatcher="deepep"), torch.bfloat16)
    assert "hybridep needs the branch hybrid-ep of the package deep_ep" in refusal(dispatcher="hybridep")
    check_overlap(TrainSection(overlap=["param_gather", "shared_experts", "experts"]), TWO, torch.bfloat16)
