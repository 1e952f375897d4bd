"""Tensors that are not trained, here a vision tower and a multi-token predictor, stay as loaded through a run's
checkpoint and its export."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from checkpoint_now import save_now
from family_proofs import check_model, differing_tensors, largest_difference, packs
from ranks import RankFailed, run_ranks
from safetensors.torch import load_file, save_file
from suites import usual
from tiny_families import EVERY, class_of, tiny_model
from tiny_policy import tiny_run

from megagrpo.config import ParallelSection
from megagrpo.families.hf_config import load_hf_config
from megagrpo.families.weight_sources import SINGLE
from megagrpo.platform.parallel.layout import init_layout
from megagrpo.policy.megatron_policy import MegatronPolicy
from megagrpo.records.checkpoints.checkpoint import Checkpointer
from megagrpo.train_types import TrainState
from megagrpo.weights.blocks.parameter_blocks import tensor_names
from megagrpo.weights.bridge.conversion import export_hf
from megagrpo.weights.bridge.hf_files import copy_side_files, files_for
from megagrpo.weights.bridge.load import load_hf
from megagrpo.weights.bridge.untrained_tensors import UNTRAINED_FILE, UNTRAINED_ORIGIN, open_untrained
from tests.family_examples import TINY_SIZES

PREDICTOR = {"model.layers.4.eh_proj.weight": torch.rand(96, 192), "model.layers.4.enorm.weight": torch.rand(96)}
NAMES = ["gemma3 multimodal", "deepseek_v3"]


def make_models(root: Path) -> None:
    for name in NAMES:
        tiny_model(*EVERY[name]).save_pretrained(root / name)
        if name == "deepseek_v3":
            save_file(load_file(root / name / SINGLE) | PREDICTOR, root / name / SINGLE, {"format": "pt"})
        (root / name / "preprocessor_config.json").write_text('{"size": 32}')


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    for name in NAMES:
        class_of(EVERY[name][0])
    root = tmp_path_factory.mktemp("models")
    run_ranks(make_models, 1, root)
    return root


def save_checkpoint(model: Path, folder: Path, parallel: dict) -> None:
    """Save a checkpoint of a run that has doubled the trained weights."""
    config, hf_config = tiny_run(parallel), load_hf_config(model)
    layout = init_layout(config.parallel)
    policy = MegatronPolicy(config, layout, hf_config)
    load_hf(policy.chunks, hf_config, model, layout)
    with torch.no_grad():
        for chunk in policy.chunks:
            for parameter in chunk.parameters():
                parameter.mul_(2)
    save_now(Checkpointer(folder, layout, policy, 1, model), TrainState(step=1))


def export(checkpoint: Path, out: Path, parallel: dict, model: str | None = None, dtype=None) -> None:
    layout = init_layout(ParallelSection(**parallel))
    export_hf(checkpoint, out, model, layout, dtype=dtype)
    layout.close()


@pytest.mark.parametrize(("name", "parallel"), usual([(NAMES[0], dict(tp=2)), (NAMES[1], dict(pp=2))], 0))
def test_an_export_of_a_runs_checkpoint_holds_what_is_not_trained(name, parallel, models, tmp_path):
    model, checkpoint = tmp_path / "model", tmp_path / "run" / "step_000001"
    shutil.copytree(models / name, model)
    run_ranks(save_checkpoint, 2, model, tmp_path / "run", parallel)
    assert json.loads((checkpoint / "hf" / UNTRAINED_ORIGIN).read_text()) == {"folder": str(model)}
    before, trained = load_file(model / SINGLE), tensor_names(load_hf_config(model))
    trained = {name for name in trained if not name.endswith("e_score_correction_bias")}  # a buffer, not doubled
    assert 0 < len(before.keys() - trained) < len(before)

    def check(out: Path) -> None:
        after = load_file(out / SINGLE)
        assert list(after) == list(before)
        assert all(torch.equal(after[name], tensor * (2 if name in trained else 1)) for name, tensor in before.items())
        assert sorted(file.name for file in out.iterdir()) == sorted(file.name for file in model.iterdir())
        assert (out / "config.json").read_bytes() == (model / "config.json").read_bytes()

    run_ranks(export, 2, checkpoint, tmp_path / "out", parallel)
    check(tmp_path / "out")
    run_ranks(export, 1, checkpoint, tmp_path / "half", {}, None, torch.bfloat16)
    half = load_file(tmp_path / "half" / SINGLE)
    assert {half[name].dtype for name in half if name in trained} <= {torch.bfloat16, torch.float32}
    assert all(torch.equal(half[name], before[name]) for name in half.keys() - trained)
    moved = model.rename(tmp_path / "moved")
    with pytest.raises(RankFailed) as caught:
        run_ranks(export, 1, checkpoint, tmp_path / "late", {})
    said = f"were in {model}, which no longer exists; put the original model back there, or name it: megagrpo export"
    assert said in str(caught.value) and not (tmp_path / "late").exists()
    run_ranks(export, 1, checkpoint, tmp_path / "late", {}, str(moved))
    shutil.copytree(moved, model)
    check(tmp_path / "late")


def save_with_names_of_modules(root: Path) -> list:
    """Save a multimodal model with both kinds of names; return transformers' logits for each pack."""
    model = tiny_model(*EVERY[NAMES[0]])
    model.save_pretrained(root / "modules", save_original_format=False)
    with torch.no_grad():
        return [
            torch.cat([model(s[None]).logits[0] for s in tokens.split(lengths)]).numpy()
            for tokens, _, lengths in packs(TINY_SIZES["vocab_size"])
        ]


def test_files_with_the_names_of_transformers_modules_load_and_come_back(models, tmp_path):
    (logits,) = run_ranks(save_with_names_of_modules, 1, tmp_path)
    folder, out, sizes = tmp_path / "modules", tmp_path / "out", dict(tp=2)
    names = load_file(folder / SINGLE)
    assert (
        "model.language_model.norm.weight" in names and "model.multi_modal_projector.mm_soft_emb_norm.weight" in names
    )
    results = run_ranks(check_model, 2, folder, out, sizes, 10**9)
    assert largest_difference(results, [torch.from_numpy(pack) for pack in logits], sizes) < 1e-5
    assert differing_tensors(folder, out) == []


def test_a_folder_that_holds_another_model_by_now_is_refused(models, tmp_path):
    from megagrpo.weights.bridge.hf_files import carry, files_of

    model, target = tmp_path / "model", tmp_path / "hf"
    shutil.copytree(models / NAMES[1], model)
    target.mkdir()
    files = files_of(model)
    carry(model, files, target, PREDICTOR)
    entries = {name: files.entries[name] for name in PREDICTOR}
    tensor_of = open_untrained(target, entries)
    assert all(torch.equal(tensor_of(name), tensor) for name, tensor in PREDICTOR.items())
    save_file(load_file(model / SINGLE) | {"model.layers.4.enorm.weight": torch.rand(97)}, model / SINGLE)
    with pytest.raises(ValueError, match=r"has no model\.layers\.4\.enorm\.weight of dtype torch\.float32 and shape"):
        open_untrained(target, entries)
    (target / UNTRAINED_ORIGIN).write_text("{}")
    with pytest.raises(ValueError, match=f"{UNTRAINED_ORIGIN} is corrupt"):
        open_untrained(target, entries)
    (target / UNTRAINED_ORIGIN).unlink()
    with pytest.raises(ValueError, match=r"does not say where .* are; put the original model back"):
        open_untrained(target, entries)


def test_an_export_drops_no_tensor_that_nothing_names(models, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(models / NAMES[1], model)
    hf_config, tensors = load_hf_config(model), load_file(model / SINGLE)
    shapes = {name: tuple(tensors[name].shape) for name in tensor_names(hf_config) & tensors.keys()}
    assert sorted(files_for(shapes, model, hf_config)[2]) == sorted(PREDICTOR)
    save_file(tensors | {"model.layers.9.odd": torch.rand(2)}, model / SINGLE)
    with pytest.raises(ValueError, match=r"hold model\.layers\.9\.odd, which this architecture does not use"):
        files_for(shapes, model, hf_config)


def test_a_converted_checkpoint_holds_them_and_an_export_has_no_own_files(models, tmp_path):
    from megagrpo.weights.bridge.hf_files import carry, files_of

    model, target = models / NAMES[1], tmp_path / "hf"
    target.mkdir()
    carry(model, files_of(model), target, PREDICTOR, whole=True)
    assert sorted(load_file(target / UNTRAINED_FILE)) == sorted(PREDICTOR)
    (tmp_path / "out").mkdir()
    copy_side_files(target, tmp_path / "out")
    assert {file.name for file in (tmp_path / "out").iterdir()} == {file.name for file in model.iterdir()} - {SINGLE}


def test_keys_that_no_block_reads_stay_as_loaded(tmp_path):
    """Published files of Gemma 4 E2B have keys and values for blocks that borrow others; transformers leaves them out
    of the files that it saves."""
    name, source = "gemma4 small", tmp_path / "model"
    class_of(EVERY[name][0])
    run_ranks(lambda: tiny_model(*EVERY[name]).save_pretrained(source), 1)
    unread = {
        f"model.layers.{block}.self_attn.{part}.weight": torch.rand(size)
        for block, size in ((2, 24), (3, 32))
        for part in ("k_proj", "v_proj", "k_norm")
    }
    save_file(load_file(source / SINGLE) | unread, source / SINGLE, {"format": "pt"})
    run_ranks(check_model, 1, source, tmp_path / "out", {}, 10**9)
    assert differing_tensors(source, tmp_path / "out") == []
