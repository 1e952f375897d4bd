"""Adapters reach the engine and other layouts: merged weights equal an export bit for bit, and checkpoints contain only
adapters."""

import json
from pathlib import Path
from unittest import mock

import pytest
import torch
from checkpoint_now import save_now
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from suites import usual
from test_build_and_bridge import run_tool
from test_lora_peft import LORA, make_with_peft, prepare
from test_weight_sync_copies import OneReader

from megagrpo.algorithms.losses import make_loss
from megagrpo.proof.verify.verified_step import whole_tensors
from megagrpo.records.checkpoints.checkpoint import Checkpointer
from megagrpo.records.checkpoints.run_files import newest_checkpoint
from megagrpo.sync.trainer_side.adapter_sync import AdapterSync
from megagrpo.sync.trainer_side.shared_memory import SharedMemory
from megagrpo.sync.trainer_side.sync import WeightSync
from megagrpo.train_types import TrainState
from megagrpo.weights.blocks.parameter_blocks import adapter_blocks, merged_blocks
from megagrpo.weights.bridge.hf_export import save_hf
from tests.message_log import objects, record


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("peft")
    run_ranks(make_with_peft, 1, folder)
    return folder


SAVED = "step_000001/adapter/adapter_model.safetensors"


def _push(root: Path, parallel: dict, shared: Path, out: Path, selection: dict | None = None):
    lora = dict(adapter_path=str(root / "adapter")) | (selection or {})
    _, layout, hf_config, policy, _ = prepare(root, parallel, **lora)
    save_hf(policy.chunks, hf_config, layout, out, root / "model", dtype=torch.bfloat16)
    engine = OneReader() if layout.world_rank == 0 else None
    with WeightSync(engine, layout, "bfloat16", SharedMemory(layout, "bfloat16", folder=shared)) as sync:
        sync.push(merged_blocks(policy.chunks, hf_config, layout), 1)
    return engine and {name: tensor.float().numpy() for name, tensor in engine.tensors.items()}


@pytest.mark.parametrize("parallel", usual([{}, dict(tp=2, pp=2)], 1), ids=str)
def test_the_engine_gets_bit_by_bit_the_weights_of_a_merged_export(parallel, root, tmp_path):
    synced = run_ranks(_push, 4 if parallel else 1, root, parallel, tmp_path / "shm", tmp_path / "out")[0]
    exported = load_file(tmp_path / "out/model.safetensors")
    base = load_file(root / "model/model.safetensors")
    assert synced.keys() == exported.keys() == base.keys()
    for name, tensor in exported.items():
        assert torch.equal(torch.from_numpy(synced[name]), tensor.float()), name
        assert torch.equal(tensor, base[name].bfloat16()) != name.endswith("_proj.weight"), name


def _train(root: Path, parallel: dict, folder: Path, steps: int, resume: bool):
    config, layout, hf_config, policy, batch = prepare(root, parallel, adapter_path=str(root / "adapter"))
    saver = Checkpointer(folder, layout, policy, 2, root / "model")
    if resume:
        assert saver.load(newest_checkpoint(saver.folder)) == TrainState(step=1)
    for _ in range(steps):
        policy.train_step(batch, make_loss(config.algorithm), batch.num_tokens)
    if not resume:
        save_now(saver, TrainState(step=1))
        policy.train_step(batch, make_loss(config.algorithm), batch.num_tokens)
    return whole_tensors(policy, hf_config, layout, lambda p: p.data)[0], saver._bytes_needed


@pytest.mark.parametrize(
    ("saved", "loaded"),
    usual([(dict(tp=2), dict(pp=2, vpp=2)), (dict(pp=2), dict(tp=2, sequence_parallel=True))], 0),
    ids=str,
)
def test_a_checkpoint_holds_adapters_alone_and_continues_in_another_layout(saved, loaded, root, tmp_path):
    unbroken, needed = run_ranks(_train, 2, root, saved, tmp_path, 1, False)[0]
    resumed, _ = run_ranks(_train, 2, root, loaded, tmp_path, 1, True)[0]
    assert max(((resumed[name] - tensor).norm() / tensor.norm()).item() for name, tensor in unbroken.items()) < 1e-6
    sizes = [
        sum(t.numel() for t in load_file(file).values())
        for file in (tmp_path / SAVED, root / "model/model.safetensors")
    ]
    assert 14 * sizes[0] <= needed < 28 * sizes[0] < 14 * sizes[1]  # the copies of all tensor-parallel ranks count
    assert sum(path.stat().st_size for path in (tmp_path / "step_000001").glob("*.distcp")) < 7 * sizes[1]
    assert (
        json.loads((tmp_path / "step_000001/adapter/adapter_config.json").read_text())["base_model_name_or_path"]
        == "tiny"
    )


def _save_and_push(root: Path, folder: Path) -> list[list[str]]:
    """The Python objects, but those of Megatron's own save, of two checkpoints and of two syncs of an adapter."""
    config, layout, hf_config, policy, _ = prepare(root, dict(tp=2), adapter_path=str(root / "adapter"))
    saver, found = Checkpointer(folder, layout, policy, 2, root / "model"), []
    with (
        AdapterSync(object() if layout.world_rank == 0 else None, layout, "float32", config.lora, "base") as sync,
        mock.patch.object(AdapterSync, "_deliver_adapter", lambda *arguments: (1, 1)),
    ):
        for number in (1, 2):
            with record(layout) as messages:
                save_now(saver, TrainState(step=number))
            found.append([text for text in objects(messages) if "hf_export" in text])
            with record(layout) as messages:
                sync.push(adapter_blocks(policy.chunks, hf_config, layout), number)
            found.append(objects(messages))
    return found


def test_ranks_tell_the_names_of_adapters_in_the_first_checkpoint_and_the_first_sync_alone(root, tmp_path):
    for first_save, first_push, *later in run_ranks(_save_and_push, 2, root, tmp_path):
        assert len(first_save) == len(first_push) == 1 and "find_sources" in first_push[0]
        assert later == [[], []]
    names = [load_file(file).keys() for file in sorted(tmp_path.glob("step_*/adapter/*.safetensors"))]
    assert len(names) == 2 and names[0] == names[1]


def test_the_tool_merges_an_adapter_into_its_model(root, tmp_path):
    assert run_ranks(
        run_tool, 2, "merge", root / "adapter", tmp_path / "out", "--model", root / "model", "--tp", 2
    ) == [0, 0]
    run_ranks(_push, 1, root, {}, tmp_path / "shm", tmp_path / "expected")
    merged, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "expected"))
    assert all(torch.equal(merged[name].bfloat16(), tensor) for name, tensor in expected.items())
    assert (
        f"from a Megatron checkpoint by megagrpo. Base model: `{root / 'model'}`."
        in (tmp_path / "out/README.md").read_text()
    )
    (tmp_path / "step_000001/adapter").mkdir(parents=True)
    assert run_ranks(run_tool, 1, "export", tmp_path / "step_000001", tmp_path / "none") == [2]
    assert run_ranks(run_tool, 1, "merge", root / "model", tmp_path / "none", "--model", root / "model") == [2]


def test_merging_a_float32_adapter_into_a_bfloat16_model_rounds_once(root, tmp_path):
    base = {name: tensor.bfloat16() for name, tensor in load_file(root / "model/model.safetensors").items()}
    (tmp_path / "model").mkdir()
    save_file(base, tmp_path / "model/model.safetensors", metadata={"format": "pt"})
    raw = json.loads((root / "model/config.json").read_text())
    (tmp_path / "model/config.json").write_text(json.dumps(raw | {"dtype": "bfloat16"}))
    arguments = ("merge", root / "adapter", tmp_path / "out", "--model", tmp_path / "model", "--tp", 2)
    assert run_ranks(run_tool, 2, *arguments) == [0, 0]
    merged, adapter = (
        load_file(tmp_path / "out/model.safetensors"),
        load_file(root / "adapter/adapter_model.safetensors"),
    )
    scale, adapted = LORA["alpha"] / LORA["rank"], 0
    for name, weight in base.items():
        prefix = f"base_model.model.{name.removesuffix('weight')}"
        if f"{prefix}lora_A.weight" not in adapter:
            assert torch.equal(merged[name], weight)
            continue
        a, b = (adapter[f"{prefix}lora_{matrix}.weight"].double() for matrix in "AB")
        expected = weight.double() + scale * b @ a
        # Half a unit in the last place of bfloat16, and the rounding of the sum in float32.
        assert ((merged[name].double() - expected).abs() <= expected.abs() * (2**-8 + 2**-20) + 1e-30).all(), name
        adapted += 1
        assert (merged[name] == expected.bfloat16()).double().mean() > 0.999, name
    assert adapted == 7 * raw["num_hidden_layers"]


@pytest.mark.full
def test_the_merge_tool_names_its_own_arguments_in_errors(root, tmp_path, capfd):
    def refused(adapter: Path, *more) -> str:
        assert run_ranks(run_tool, 1, "merge", adapter, tmp_path / "out", *more) == [2]
        return capfd.readouterr().err

    model = ("--model", root / "model")
    assert f"error: ADAPTER: {root / 'model'} has no adapter_config.json" in refused(root / "model", *model)
    saved = json.loads((root / "adapter/adapter_config.json").read_text())
    tensors = load_file(root / "adapter/adapter_model.safetensors")
    cut = {name: tensor[:, :-1].contiguous() if name == min(tensors) else tensor for name, tensor in tensors.items()}
    fewer = {name: tensor for name, tensor in tensors.items() if name != min(tensors)}
    for folder, changes, held, expected in (
        (
            "biases",
            dict(bias="all"),
            tensors,
            "has bias all; only LoRA of one rank is supported",
        ),
        ("fewer", {}, fewer, "is only in the model (1 such tensors); name the model that the adapter was trained on"),
        ("cut", {}, cut, "the model needs [4, "),
    ):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "adapter_config.json").write_text(json.dumps(saved | changes))
        save_file(held, tmp_path / folder / "adapter_model.safetensors")
        told = refused(tmp_path / folder, *model)
        assert "error: ADAPTER: " in told and expected in told and "lora." not in told.replace("lora_", "")
    (tmp_path / "fewer/adapter_config.json").write_text(
        json.dumps(saved | {"base_model_name_or_path": "/no/such/model"})
    )
    assert "adapter_config.json (or name one with --model): /no/such/model does not exist" in refused(
        tmp_path / "fewer"
    )
    assert "error: --model: /no/such/model does not exist" in refused(tmp_path / "fewer", "--model", "/no/such/model")
