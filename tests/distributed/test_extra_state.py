"""Checkpoints between models with an extra state per layer, as Transformer Engine has, and models without it."""

import json
from pathlib import Path

import pytest
import torch
from checkpoint_now import save_now
from ranks import run_ranks
from suites import usual
from test_checkpoint import checkpointer, step_once
from tiny_policy import tiny_model

from megagrpo.config import ParallelSection
from megagrpo.platform.parallel.layout import init_layout
from megagrpo.policy.attention.packed import TorchAttention
from megagrpo.policy.build import build_model
from megagrpo.policy.layers.norm_modules import RMSNorm
from megagrpo.policy.reference import Reference
from megagrpo.policy.transformer.transformer_config import ModelOptions
from megagrpo.records.checkpoints.run_files import newest_checkpoint
from megagrpo.train_types import TrainState
from megagrpo.weights.bridge.megatron_io import METADATA, load_model, model_state
from megagrpo.weights.files.data_only import read_metadata


def give_extra_state(held: dict[int, torch.Tensor] | None = None) -> None:
    """Give this process's layers an extra state like Transformer Engine's: an empty tensor, or the layer's entry in
    `held`."""
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    def get(layer: torch.nn.Module) -> torch.Tensor:
        return (held or {}).get(id(layer), torch.empty(0, dtype=torch.uint8))

    def take(layer: torch.nn.Module, state: torch.Tensor | None) -> None:
        if state is not None and state.numel():
            held[id(layer)] = state

    for layer in (RMSNorm, TorchAttention, ColumnParallelLinear, RowParallelLinear):
        layer.get_extra_state, layer.set_extra_state = get, take


def run_of(model: Path, folder: Path, with_extra_state: bool):
    """This rank's policy with a moved reference, and the checkpointer of both."""
    if with_extra_state:
        give_extra_state()
    policy, saver = checkpointer(model, folder)
    saver.reference = Reference(policy)
    return policy, saver


def _save_and_go_on(model, folder, with_extra_state):
    policy, saver = run_of(model, folder, with_extra_state)
    saver.reference.mix_in(0.25)
    step_once(policy, saver.layout)
    save_now(saver, TrainState(step=1))
    return after_a_step(policy, saver)


def _resume_and_go_on(model, folder, with_extra_state):
    policy, saver = run_of(model, folder, with_extra_state)
    saver.load(newest_checkpoint(saver.folder))
    return after_a_step(policy, saver)


def after_a_step(policy, saver) -> list:
    step_once(policy, saver.layout)
    return [
        w.detach().cpu().numpy().copy()
        for w in (*saver.reference.weights, *(p for c in policy.chunks for p in c.parameters()))
    ]


@pytest.fixture
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(tiny_model("llama_tied").raw))
    return folder


@pytest.mark.full
@pytest.mark.parametrize("first", [True, False], ids=["from_such_a_model", "into_such_a_model"])
def test_a_run_goes_on_where_layers_have_another_extra_state(first, model, tmp_path):
    unbroken = run_ranks(_save_and_go_on, 2, model, tmp_path, first)
    resumed = run_ranks(_resume_and_go_on, 2, model, tmp_path, not first)
    for one, other in zip(unbroken, resumed, strict=True):
        assert len(one) == len(other) > 20 and all((a == b).all() for a, b in zip(one, other, strict=True))
    stored = read_metadata(tmp_path / "step_000001").state_dict_metadata
    assert any(key.startswith("reference.") for key in stored) and not [key for key in stored if "_extra_state" in key]


def _with_a_history(model, folder):
    """The number of layers with an extra state when a checkpoint is written, and whether each still has one after
    loading."""
    held: dict[int, torch.Tensor] = {}
    give_extra_state(held)
    policy, saver = checkpointer(model, folder)
    norms = [module for chunk in policy.chunks for module in chunk.modules() if isinstance(module, RMSNorm)]
    held |= {id(norm): torch.full((4,), i + 1.0) for i, norm in enumerate(norms)}
    save_now(saver, TrainState(step=1))
    held |= {id(norm): torch.zeros(4) for norm in norms}
    saver.load(newest_checkpoint(saver.folder))
    return len(norms), [held[id(norm)].any().item() for norm in norms]


@pytest.mark.full
def test_an_extra_state_is_not_written_even_if_it_holds_something(model, tmp_path):
    for norms, found in run_ranks(_with_a_history, 2, model, tmp_path):
        assert norms > 4 and not any(found)
    assert not [key for key in read_metadata(tmp_path / "step_000001").state_dict_metadata if "_extra_state" in key]


def _weights(folder: Path, with_extra_state: bool, save: bool) -> list:
    """Save a model's weights as Megatron does, or read them back into a model of zeros."""
    from megatron.core import dist_checkpointing

    if with_extra_state:
        give_extra_state()
    layout = init_layout(ParallelSection(tp=2))
    torch.manual_seed(0)
    chunks = build_model(tiny_model("qwen3_moe"), layout, ModelOptions(dtype=torch.float32, sequence_parallel=True))
    if save:
        dist_checkpointing.save(
            model_state(chunks, layout), str(folder), content_metadata=METADATA, async_strategy="mcore"
        )
    else:
        with torch.no_grad():
            [parameter.zero_() for chunk in chunks for parameter in chunk.parameters()]
        load_model(chunks, folder, layout)
    return [p.detach().cpu().numpy().copy() for chunk in chunks for p in chunk.parameters()]


@pytest.mark.parametrize("first", usual([True, False], 1), ids=["from_such_a_model", "into_such_a_model"])
def test_weights_alone_are_read_where_layers_have_another_extra_state(first, tmp_path):
    saved, read = run_ranks(_weights, 2, tmp_path, first, True), run_ranks(_weights, 2, tmp_path, not first, False)
    for one, other in zip(saved, read, strict=True):
        assert all((a == b).all() for a, b in zip(one, other, strict=True)) and any(a.any() for a in one)
