"""A checkpoint of one layout resumes in another: the next step gives the weights of the uninterrupted run."""

from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from ranks import run_ranks

from megagrpo.algorithms.losses import make_loss
from megagrpo.algorithms.reductions import denominator
from megagrpo.config import RunConfig
from megagrpo.data.packing.sample_packing import PackingRules, pack
from megagrpo.families.hf_config import load_hf_config
from megagrpo.platform.parallel.layout import init_layout
from megagrpo.policy.megatron_policy import MegatronPolicy
from megagrpo.records.checkpoints.checkpoint import Checkpointer
from megagrpo.records.checkpoints.run_files import newest_checkpoint
from megagrpo.train_types import TrainSample, TrainState
from megagrpo.weights.blocks.parameter_blocks import blocks
from megagrpo.weights.bridge.load import load_hf

STATE = TrainState(step=1, weight_version=2, cursor=8)
# 96 is no multiple of 128, so megatron-core pads between the buckets of its gradient buffer.
SIZES = dict(
    vocab_size=103,
    hidden_size=96,
    num_hidden_layers=4,
    num_attention_heads=6,
    num_key_value_heads=2,
    intermediate_size=64,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A random tiny Llama with tied embeddings, which two pipeline stages both hold."""
    folder = tmp_path_factory.mktemp("model")
    run_ranks(_make_model, 1, folder)
    return folder


def _make_model(folder: Path) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **SIZES, tie_word_embeddings=True, initializer_range=0.1, max_position_embeddings=64
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def settings(parallel: dict, algorithm: dict | None = None, train: dict | None = None) -> RunConfig:
    return RunConfig.model_validate(
        dict(
            model=dict(path="x", precision="fp32"),
            parallel=parallel,
            rollout=dict(max_prompt_length=8, max_completion_length=8),
            data=dict(train=dict(source="x")),
            rewards=dict(functions=[dict(function="exact_number")]),
            algorithm=algorithm or {},
            train=dict(learning_rate=1e-2, adam_epsilon=1e-3, max_tokens_per_micro_batch=64) | (train or {}),
        )
    )


def samples() -> list[TrainSample]:
    generator = torch.Generator().manual_seed(1)
    mask = torch.arange(9) >= 4
    return [
        TrainSample(
            torch.randint(0, 103, (9,), generator=generator), mask, torch.where(mask, -4.6, 0.0), advantage=(-1.0) ** i
        )
        for i in range(8)
    ]


def train_steps(parallel: dict, model: Path, checkpoints: Path, resume: bool, **sections: dict) -> dict:
    """This rank's blocks after two steps: in one run with a checkpoint between them, or resumed from that
    checkpoint."""
    config = settings(parallel, **sections)
    layout = init_layout(config.parallel)
    hf_config = load_hf_config(model)
    policy = MegatronPolicy(config, layout, hf_config)
    load_hf(policy.chunks, hf_config, model, layout)
    policy.weights_changed()
    checkpointer = Checkpointer(checkpoints, layout, policy, 1, model)
    p = config.parallel
    rules = PackingRules(
        max_tokens=64, at_least=p.pp, multiple_of=p.pp, align=config.micro_batch_align, sequence_align=p.sequence_align
    )
    batch = pack(samples(), rules, layout.dp_rank, layout.dp_size)
    divisor = denominator(batch, config.algorithm.loss.average, config.rollout.max_completion_length)
    if resume:
        assert checkpointer.load(newest_checkpoint(checkpointer.folder)) == STATE
    else:
        policy.train_step(batch, make_loss(config.algorithm), divisor)
        checkpointer.start(STATE, background=True)
    policy.train_step(batch, make_loss(config.algorithm), divisor)
    checkpointer.finish(wait=True)
    held = {}
    for _, parameter, found in blocks(policy.chunks, hf_config, layout):
        held |= {(b.name, b.shape, b.box): b.read(parameter.detach()).numpy().copy() for b in found}
    layout.close()
    return held


def full_tensors(ranks: list[dict]) -> dict[str, torch.Tensor]:
    full = {}
    for (name, shape, box), values in [item for held in ranks for item in held.items()]:
        full.setdefault(name, torch.full(shape, torch.nan))[tuple(map(slice, *box))] = torch.from_numpy(values)
    return full


@pytest.fixture(scope="module")
def model_with_experts(tmp_path_factory) -> Path:
    """A random tiny Qwen3-MoE whose first two blocks are dense: the first of two pipeline stages has no experts."""
    folder = tmp_path_factory.mktemp("model_with_experts")
    run_ranks(_make_model_with_experts, 1, folder)
    return folder


def _make_model_with_experts(folder: Path) -> None:
    torch.manual_seed(0)
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, mlp_only_layers=[0, 1], head_dim=16)
    config = transformers.Qwen3MoeConfig(**SIZES | experts, initializer_range=0.1, max_position_embeddings=64)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)


ONE, DP2, TP2, PP2, VPP = ({}, 1), ({}, 2), (dict(tp=2), 2), (dict(pp=2), 2), (dict(pp=2, vpp=2), 2)
CP2, CP2_DP2, UNEVEN = (dict(cp=2), 2), (dict(cp=2), 4), (dict(pp=2, pipeline_layers=[1, 3]), 2)


def _full(*case):
    return pytest.param(*case, marks=pytest.mark.full)


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        _full(PP2, PP2),
        _full(PP2, ONE),
        (VPP, TP2),
        _full(DP2, ONE),
        _full(TP2, PP2),
        _full(ONE, DP2),
        _full((dict(pp=2), 4), PP2),
        _full(CP2_DP2, TP2),
        _full(DP2, CP2),
        _full(UNEVEN, ONE),
        _full(VPP, UNEVEN),
    ],
    ids=str,
)
def test_a_run_continues_from_a_checkpoint_of_another_layout(saved, loaded, model, tmp_path):
    assert_continues(saved, loaded, model, tmp_path)


EP2, PP2_EP2 = (dict(ep=2), 2), (dict(pp=2, ep=2), 4)
TP2_ETP1, TP2_EP2 = (dict(tp=2, etp=1, sequence_parallel=True), 2), (dict(tp=2, ep=2, sequence_parallel=True), 4)
ETP2, TP2_EP4, VPP_EP2 = (
    (dict(etp=2), 2),
    (dict(tp=2, ep=4, etp=1, sequence_parallel=True), 4),
    (dict(pp=2, vpp=2, ep=2), 4),
)
TP2_PP2, TP2_VPP = (dict(tp=2, pp=2, etp=1, ep=2, sequence_parallel=True), 4), (dict(tp=2, pp=2, vpp=2), 4)


@pytest.mark.full
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [(TP2, VPP), (ONE, VPP), (TP2_VPP, UNEVEN), (UNEVEN, TP2_VPP), (TP2, CP2_DP2), (VPP, CP2)],
    ids=str,
)
def test_virtual_stages_come_and_go(saved, loaded, model, tmp_path):
    assert_continues(saved, loaded, model, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (ETP2, EP2),
        (EP2, ETP2),
        (VPP_EP2, TP2_EP4),
        (TP2_EP4, VPP_EP2),
        (TP2_PP2, ETP2),
        (TP2_EP4, ONE),
        (DP2, TP2_PP2),
        (TP2_ETP1, VPP),
    ],
    ids=str,
)
def test_experts_go_between_all_ways_of_cutting_them(saved, loaded, model_with_experts, tmp_path):
    assert_continues(saved, loaded, model_with_experts, tmp_path)


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [_full(EP2, ONE), _full(ONE, TP2_EP2), _full(PP2_EP2, TP2_ETP1), _full(TP2_EP2, PP2_EP2), (VPP_EP2, ETP2)],
    ids=str,
)
def test_experts_go_from_any_number_of_expert_parallel_ranks_to_any_other(saved, loaded, model_with_experts, tmp_path):
    assert_continues(saved, loaded, model_with_experts, tmp_path)


def space_that_a_checkpoint_takes(parallel: dict, model: Path, checkpoints: Path) -> int:
    layout = init_layout(settings(parallel).parallel)
    policy = MegatronPolicy(settings(parallel), layout, load_hf_config(model))
    layout_bytes = Checkpointer(checkpoints, layout, policy, 1, model)._bytes_needed
    layout.close()
    return layout_bytes


def test_every_expert_is_counted_once_in_the_space_that_a_checkpoint_takes(model_with_experts, tmp_path):
    (one,) = run_ranks(space_that_a_checkpoint_takes, 1, {}, model_with_experts, tmp_path)
    assert run_ranks(space_that_a_checkpoint_takes, 4, dict(ep=2), model_with_experts, tmp_path) == [one] * 4


def assert_continues(saved: tuple, loaded: tuple, model: Path, tmp_path: Path, **sections: dict) -> dict:
    """The tensors after the second step."""
    unbroken = full_tensors(run_ranks(partial(train_steps, **sections), saved[1], saved[0], model, tmp_path, False))
    resumed = full_tensors(run_ranks(partial(train_steps, **sections), loaded[1], loaded[0], model, tmp_path, True))
    assert resumed.keys() == unbroken.keys()
    for name, tensor in unbroken.items():
        assert ((resumed[name] - tensor).norm() / tensor.norm()).item() < 1e-6, name
    return resumed
