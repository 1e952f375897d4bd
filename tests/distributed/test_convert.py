"""Hugging Face -> Megatron -> Hugging Face restores every file byte for byte, in every layout, and also after a
kill."""

from __future__ import annotations

import fcntl
import functools
import json
import os
import re
import resource
import shutil
import signal
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from covering import covering_rows
from ranks import RankFailed, run_ranks
from safetensors.torch import load_file, save_file
from suites import usual
from test_build_and_bridge import run_tool
from tiny_families import EVERY, MODELS, has_experts, on_one_stage, tiny_model, write_model

from megagrpo.config import ParallelSection
from megagrpo.families.hf_config import load_hf_config
from megagrpo.families.weight_sources import INDEX
from megagrpo.platform.parallel.layout import init_layout
from megagrpo.policy.build import build_model
from megagrpo.policy.transformer.transformer_config import ModelOptions
from megagrpo.weights.bridge import conversion
from megagrpo.weights.bridge.conversion import export_hf, import_hf
from megagrpo.weights.bridge.hf_files import HEADERS_FILE, Writer
from megagrpo.weights.bridge.load import load_hf
from megagrpo.weights.bridge.megatron_io import METADATA, model_state
from megagrpo.weights.files import partial_files as unfinished
from megagrpo.weights.files import torch_dist
from megagrpo.weights.files.file_checksums import CHECKSUMS, checksums
from megagrpo.weights.files.partial_files import Unfinished
from megagrpo.weights.files.torch_dist import PieceWriter

EVEN, UNEVEN = {1: None, 2: None, 4: None}, {2: [1, 3], 4: [1, 1, 1, 1]}
AXES = {"tp": [1, 2], "pp": [1, 2, 4], "vpp": [1, 2], "uneven": [False, True], "ep": [1, 2, 4], "etp": [None, 1, 2]}
RULES = [
    (("tp", "pp"), lambda tp, pp: tp * pp <= 4),
    (("pp", "vpp"), lambda pp, vpp: vpp == 1 or pp == 2),
    (("pp", "uneven"), lambda pp, uneven: pp == 2 or not uneven),
    (("tp", "pp", "ep", "etp"), lambda tp, pp, ep, etp: ep * (etp or tp) * pp <= 4),
]
# Families of the default suite: what differs in their tensors is tied, fused, stacked, latent, recurrent or beside
# a tower. `test_build_and_bridge.py` compares the export of every family.
USUAL = ("llama tied", "qwen2", "phi3", "qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_next")


@functools.cache
def rows(experts: bool) -> list[dict]:
    """Layouts that contain every two sizes with experts, every three without."""
    if experts:
        return covering_rows(AXES, RULES)
    return covering_rows({axis: AXES[axis] for axis in AXES if axis not in ("ep", "etp")}, RULES[:3], 3)


def sizes_of(row: dict) -> dict:
    layers = {1: [1, 3], 2: [1, 1, 1, 1]}[row["vpp"]] if row["uneven"] else None
    return dict(
        tp=row["tp"], pp=row["pp"], vpp=row["vpp"], pipeline_layers=layers, ep=row.get("ep", 1), etp=row.get("etp")
    )


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """A folder with models of some families in bfloat16, with some float32 tensors, in several files."""
    root = tmp_path_factory.mktemp("models")
    run_ranks(make_models, 1, root, made_by_default())
    return root


def made_by_default() -> list[str]:
    """The models of the tests of this file."""
    return [*USUAL, "qwen3", "llama untied", next(name for name in EVERY if name not in MODELS)]


def make_models(root: Path, names: list[str]) -> None:
    for name in names:
        model = tiny_model(*EVERY[name]).to(torch.bfloat16)
        for part, module in model.named_modules():
            if part.endswith(("gate", "router", "layers.1.input_layernorm", "layers.3.self_attn.v_proj")):
                module.float()
                for parameter in module.parameters():
                    parameter.data.mul_(1 + 2.0**-12)  # not representable in bfloat16
        write_model(model, root / name, max_shard_size="150KB")


def there(source: Path, out: Path, sizes: dict) -> None:
    layout = init_layout(ParallelSection(**sizes))
    import_hf(str(source), out, layout)
    layout.close()


def back(checkpoint: Path, out: Path, sizes: dict, model: str | None = None) -> None:
    layout = init_layout(ParallelSection(**sizes))
    export_hf(checkpoint, out, model, layout)
    layout.close()


def world(sizes: dict) -> int:
    return ParallelSection(**sizes).smallest_world


def assert_same_files(folder: Path, other: Path) -> None:
    assert sorted(file.name for file in folder.iterdir()) == sorted(file.name for file in other.iterdir())
    for file in folder.iterdir():
        assert file.read_bytes() == (other / file.name).read_bytes(), file.name


def through_layouts(models: Path, scratch: Path, pairs: list[tuple[str, dict, dict]]) -> None:
    """Convert each model to Megatron in one layout and back in another, in the same ranks."""
    for i, (name, one, other) in enumerate(pairs):
        layout = init_layout(ParallelSection(**one))
        import_hf(str(models / name), scratch / f"megatron{i}", layout)
        layout.release()
        layout = init_layout(ParallelSection(**other))
        export_hf(scratch / f"megatron{i}", scratch / f"hf{i}", None, layout)
        layout.release()


def assert_round_trips(models: Path, scratch: Path, pairs: list[tuple[str, dict, dict]], ranks: int) -> None:
    run_ranks(through_layouts, ranks, models, scratch, pairs, timeout=280)
    for i, (name, _, _) in enumerate(pairs):
        assert_same_files(models / name, scratch / f"hf{i}")
        assert not list(scratch.glob(".*"))
        shutil.rmtree(scratch / f"megatron{i}")


def pairs_of(name: str, ranks: int) -> list[tuple[str, dict, dict]]:
    """Convert one model through every layout of the covering set with this number of ranks, and back in the next
    layout."""
    sizes = [each for each in map(sizes_of, rows(has_experts(name))) if world(each) <= ranks]
    sizes = [each for each in sizes if each["pp"] == 1] if on_one_stage(name) else sizes
    return [(name, each, sizes[(i + 1) % len(sizes)]) for i, each in enumerate(sizes)]


def test_families_come_back_byte_for_byte_from_another_layout(models, tmp_path):
    """Each model in one layout of two ranks; a vocabulary of 127 tokens is padded under tp=2."""
    names = [*USUAL, next(name for name in EVERY if name not in MODELS)]
    pairs = [pairs_of(name, 2) for name in names]
    assert_round_trips(models, tmp_path, [each[5 * i % len(each)] for i, each in enumerate(pairs)], 2)


@pytest.mark.full
@pytest.mark.parametrize("name", EVERY)
def test_every_family_comes_back_from_every_layout(name, models, tmp_path):
    if name not in made_by_default():
        run_ranks(make_models, 1, models, [name])
    assert_round_trips(models, tmp_path, pairs_of(name, 4), 4)


def test_the_covering_set_holds_all_sizes():
    values = [{axis: row[axis] for axis in AXES} for row in rows(experts=True)]
    assert all(any(row[axis] == value for row in values) for axis in AXES for value in AXES[axis])


def save_with_megatron(source: Path, out: Path, sizes: dict) -> None:
    from megatron.core import dist_checkpointing

    layout = init_layout(ParallelSection(**sizes))
    hf_config = load_hf_config(source)
    chunks = build_model(hf_config, layout, ModelOptions(dtype=torch.float32, init_weights=False))
    load_hf(chunks, hf_config, source, layout)
    if layout.world_rank == 0:
        out.mkdir()
    layout.barrier()
    dist_checkpointing.save(model_state(chunks, layout), str(out), content_metadata=METADATA, async_strategy="mcore")
    layout.close()


@pytest.mark.parametrize("sizes", [dict(tp=2, ep=2), pytest.param(dict(pp=2), marks=pytest.mark.full)], ids=str)
def test_a_checkpoint_that_megatron_itself_has_written_gives_the_model_it_started_from(sizes, models, tmp_path):
    """Convert through float32: the files' own dtypes are restored."""
    source = models / "qwen3_moe"
    sizes = sizes | dict(etp=1)
    run_ranks(save_with_megatron, world(sizes), source, tmp_path / "megatron", sizes)
    run_ranks(back, 1, tmp_path / "megatron", tmp_path / "hf", {}, str(source))
    assert_same_files(source, tmp_path / "hf")


def in_float32(source: Path, folder: Path) -> Path:
    """A copy of a model in float32 whose numbers bfloat16 cannot hold, in one file."""
    numbers = torch.Generator().manual_seed(0)
    names = [name for file in source.glob("*.safetensors") for name in load_file(file)]
    return add_tensor(source, folder, **{name: lambda found, name=name: noisy(found[name], numbers) for name in names})


def noisy(tensor: torch.Tensor, numbers: torch.Generator) -> torch.Tensor:
    return tensor.float() + torch.rand(tensor.shape, generator=numbers) / 1000


def test_an_export_says_what_it_rounds_and_float32_keeps_every_bit(models, tmp_path, capfd):
    source = in_float32(models / "qwen2", tmp_path / "model")
    run_ranks(there, 1, source, tmp_path / "megatron", {})
    export = ("export", tmp_path / "megatron")
    for name, words in (
        ("start", ("--model", models / "qwen2")),
        ("whole", ("--dtype", "float32")),
        ("half", ("--dtype", "float16")),
    ):
        assert run_ranks(run_tool, 1, *export, tmp_path / name, *words) == [0]
    said = capfd.readouterr().err
    assert "whole: rounded" not in said
    assert "start: rounded to bfloat16 (the start model's dtype); --dtype float32 keeps every bit" in said
    assert "half: rounded to float16 (--dtype); --dtype float32 keeps every bit" in said
    before = load_file(source / "model.safetensors")
    for name, dtype in (("whole", torch.float32), ("half", torch.float16)):
        after = load_file(tmp_path / name / "model.safetensors")
        assert after.keys() == before.keys() and all(torch.equal(after[n], before[n].to(dtype)) for n in before)
        assert load_hf_config(tmp_path / name).dtype == str(dtype).removeprefix("torch.")


def add_tensor(source: Path, folder: Path, **tensors) -> Path:
    """A copy of a model in one file, with more tensors in it."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors", INDEX))
    found = {name: tensor for file in source.glob("*.safetensors") for name, tensor in load_file(file).items()}
    found |= {name: tensor(found) if callable(tensor) else tensor for name, tensor in tensors.items()}
    save_file(found, folder / "model.safetensors")
    return folder


@pytest.mark.full
def test_an_export_with_the_config_of_another_model_says_what_differs(models, tmp_path, capfd):
    """The longest text does not change what the model computes, the rotation does."""
    run_ranks(there, 1, models / "llama untied", tmp_path / "megatron", {})
    for name, changes, said in (
        ("same", {"max_position_embeddings": 512}, ""),
        ("other", {"rms_norm_eps": 1e-3, "rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "norm_eps, rope_"),
    ):
        source = tmp_path / name
        shutil.copytree(models / "llama untied", source)
        raw = json.loads((source / "config.json").read_text())
        (source / "config.json").write_text(json.dumps(raw | changes))
        run_ranks(back, 1, tmp_path / "megatron", tmp_path / f"hf_{name}", {}, str(source))
        printed = capfd.readouterr().err
        assert ("warning: --model: " in printed) == bool(said) and said in printed, printed
        assert json.loads((tmp_path / f"hf_{name}" / "config.json").read_text()) == raw | changes
    (tmp_path / "megatron" / "hf" / "config.json").write_text("{")
    run_ranks(back, 1, tmp_path / "megatron", tmp_path / "hf_again", {}, str(models / "llama untied"))
    assert_same_files(models / "llama untied", tmp_path / "hf_again")


def test_a_tied_head_with_a_tensor_of_its_own_comes_back(models, tmp_path):
    head = {"lm_head.weight": lambda found: found["model.embed_tokens.weight"].clone()}
    source = add_tensor(models / "llama tied", tmp_path / "model", **head)
    run_ranks(there, 1, source, tmp_path / "megatron", {})
    run_ranks(back, 2, tmp_path / "megatron", tmp_path / "hf", dict(pp=2))
    assert_same_files(source, tmp_path / "hf")


@pytest.mark.full
def test_what_is_not_trained_comes_back_with_all_bytes_and_is_counted(models, tmp_path, capfd):
    """Add rotary frequencies, and a layer behind the last that predicts further tokens."""
    beyond = {f"model.layers.4.{name}": torch.rand(6, 4) for name in ("eh_proj.weight", "mlp.experts.7.up_proj.weight")}
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.rand(4)} | beyond
    source = add_tensor(models / "deepseek_v3", tmp_path / "model", **extra)
    assert run_ranks(run_tool, 1, "roundtrip", source, "--manifest", tmp_path / "m.json", "--scratch", tmp_path) == [0]
    manifest = json.loads((tmp_path / "m.json").read_text())
    assert manifest["identical"] and not manifest["differences"] and set(manifest["untrained"]) == extra.keys()
    said, all_of_it = capfd.readouterr(), len(load_file(source / "model.safetensors"))
    assert "model: kept as loaded, not trained: 2 tensors of layer 4: model.layers.4.eh_proj.weight, " in said.err
    assert "kept as loaded, not trained: 3 tensors of layers 0, 4: " in said.out
    assert f"{all_of_it} tensors, 0.001 GB, 1 files: unchanged after both conversions" in said.out
    run_ranks(there, 1, source, tmp_path / "megatron", {})
    whole = source.rename(tmp_path / "moved")  # a converted checkpoint holds them itself
    run_ranks(back, 2, tmp_path / "megatron", tmp_path / "hf", dict(ep=2))
    assert_same_files(whole, tmp_path / "hf")


def killed(action, holder, method: str, at: int, *args) -> None:
    """Run `action(*args)`; rank 0 is killed at call number `at` of the method."""
    original, calls = getattr(holder, method), [0]

    def call(*rest, **options):
        calls[0] += 1
        if calls[0] == at and os.environ["RANK"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*rest, **options)

    setattr(holder, method, call)
    conversion._COMMIT = torch_dist._COMMIT = 0  # every finished piece is committed at once
    action(*args)


def counted(action, holder, method: str, *args) -> tuple[int, int]:
    """The number of calls of a method in `action(*args)`, and the number of bytes that the space check requires."""
    original, calls, asked = getattr(holder, method), [0], []
    check_space = Unfinished.check_space
    Unfinished.check_space = lambda self, needed: (asked.append(needed), check_space(self, needed))

    def call(*rest, **options):
        calls[0] += 1
        return original(*rest, **options)

    setattr(holder, method, call)
    action(*args)
    return calls[0], sum(asked)


@pytest.mark.parametrize(
    ("action", "holder", "sizes"),
    usual([(there, PieceWriter, dict(tp=2)), (back, Writer, {})], 0),
    ids=["there", "back"],
)
def test_a_killed_conversion_goes_on_where_it_stopped(action, holder, sizes, models, tmp_path):
    source, out = models / "qwen2", tmp_path / "out"
    if action is back:
        run_ranks(there, 1, source, tmp_path / "megatron", {})
        source = tmp_path / "megatron"
    calls, space = run_ranks(counted, world(sizes), action, holder, "write", source, tmp_path / "unbroken", sizes)[0]
    for at in (3, 5):  # the second attempt is killed as well
        with pytest.raises(RankFailed, match="rank 0: killed by SIGKILL"):
            run_ranks(killed, world(sizes), action, holder, "write", at, source, out, sizes)
        assert not out.exists() and (tmp_path / ".out.partial").is_dir()
    rest, left = run_ranks(counted, world(sizes), action, holder, "write", source, out, sizes)[0]
    assert rest == calls - 2 - 4 and (left < space or action is back) and not (tmp_path / ".out.partial").exists()
    if action is there:
        run_ranks(back, 1, out, tmp_path / "hf", {})
    assert_same_files(models / "qwen2", tmp_path / "hf" if action is there else out)


@pytest.mark.full
@pytest.mark.parametrize("method", ["add_pieces", "carry"])
def test_a_conversion_killed_at_its_very_end_can_be_done_again(method, models, tmp_path):
    source = models / "qwen3"
    with pytest.raises(RankFailed):
        run_ranks(killed, 1, there, conversion, method, 1, source, tmp_path / "out", {})
    assert not (tmp_path / "out").exists()
    run_ranks(there, 1, source, tmp_path / "out", {})
    run_ranks(back, 1, tmp_path / "out", tmp_path / "hf", {})
    assert_same_files(source, tmp_path / "hf")


@pytest.mark.full
def test_what_was_left_of_another_model_is_not_taken_up(models, tmp_path):
    with pytest.raises(RankFailed):
        run_ranks(killed, 1, there, PieceWriter, "write", 5, models / "qwen2", tmp_path / "out", {})
    run_ranks(there, 1, models / "qwen3", tmp_path / "out", {})
    run_ranks(back, 1, tmp_path / "out", tmp_path / "hf", {})
    assert_same_files(models / "qwen3", tmp_path / "hf")


def test_two_conversions_do_not_write_the_same_folder(models, tmp_path):
    (tmp_path / ".out.partial").mkdir()
    held = os.open(tmp_path / ".out.partial", os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    with pytest.raises(RankFailed, match="out is being written by another process"):
        run_ranks(there, 1, models / "qwen2", tmp_path / "out", {})
    os.close(held)


def with_little_disk(action, *args) -> str:
    """The error of `action` on a disk with 20 kB."""
    usage = namedtuple("usage", "free")
    unfinished.shutil.disk_usage = lambda path: usage(20_000)
    with pytest.raises(OSError) as error:
        action(*args)
    return str(error.value)


def with_a_disk_that_fills(action, *args) -> None:
    """Run the action where a file can take 30 kB at most."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, resource.RLIM_INFINITY))
    with pytest.raises(OSError, match="File too large"):
        action(*args)


def test_too_little_disk_is_told_before_the_first_byte_and_leaves_nothing(models, tmp_path):
    run_ranks(there, 1, models / "qwen2", tmp_path / "megatron", {})
    for action, source in ((there, models / "qwen2"), (back, tmp_path / "megatron")):
        (message,) = run_ranks(with_little_disk, 1, action, source, tmp_path / "out", {})
        assert "not enough disk space for " in message and "GB more needed" in message and "0.00 GB free" in message
        run_ranks(with_a_disk_that_fills, 1, action, source, tmp_path / "out", {})
        assert [file.name for file in tmp_path.iterdir()] == ["megatron"]


def spoil(folder: Path, copy: Path, change) -> Path:
    shutil.copytree(folder, copy)
    change(copy)
    return copy


def with_nan(folder: Path) -> None:
    """Put a NaN into the last layer."""
    name = "model.layers.3.self_attn.o_proj.weight"
    file = next(file for file in folder.glob("*.safetensors") if name in load_file(file))
    tensors = load_file(file)
    tensors[name].view(-1)[7] = float("nan")
    save_file(tensors, file, {"format": "pt"})


@pytest.mark.parametrize("sizes", [{}, dict(pp=2)], ids=str)
def test_a_nan_is_found_on_whichever_rank_and_nothing_is_left(sizes, models, tmp_path):
    source = spoil(models / "qwen2", tmp_path / "model", with_nan)
    with pytest.raises(RankFailed, match=r"proj.weight in .*model-0\d+-of-0\d+.safetensors holds nan at \[0, 7\]"):
        run_ranks(there, world(sizes), source, tmp_path / "out", sizes)
    assert [file.name for file in tmp_path.iterdir()] == ["model"]


def train_from(source: Path) -> None:
    layout = init_layout(ParallelSection())
    hf_config = load_hf_config(source)
    load_hf(
        build_model(hf_config, layout, ModelOptions(dtype=torch.float32, init_weights=False)), hf_config, source, layout
    )


def test_a_nan_is_found_when_training_starts(models, tmp_path):
    with pytest.raises(RankFailed, match="holds nan at"):
        run_ranks(train_from, 1, spoil(models / "qwen2", tmp_path / "model", with_nan))


def truncate(folder: Path) -> None:
    os.truncate(folder / "__0_1.distcp", (folder / "__0_1.distcp").stat().st_size // 2)


def overwrite(folder: Path) -> None:
    with open(folder / "__0_1.distcp", "r+b") as file:
        file.write(b"\0" * 100_000)


def flip_a_bit(folder: Path, name: str = "__0_1.distcp") -> None:
    data = bytearray((folder / name).read_bytes())
    data[len(data) // 2] ^= 4
    (folder / name).write_bytes(data)


def flip_a_bit_of_the_config(folder: Path) -> None:
    """Damage the config of a checkpoint that has checksums of its files, like checkpoints of runs."""
    (folder / CHECKSUMS).write_text(json.dumps(checksums(folder, [folder / "hf" / "config.json"])))
    flip_a_bit(folder, "hf/config.json")


def change_config(**values):
    def change(folder: Path) -> None:
        path = folder / "hf" / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def change_header(folder: Path) -> None:
    path = folder / "hf" / HEADERS_FILE
    path.write_text(path.read_text().replace("k_proj", "m_proj"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda folder: (folder / "__0_1.distcp").unlink(),
            "lacks __0_1.distcp, which .metadata names; copy the checkpoint again",
        ),
        (truncate, r"__0_1.distcp is truncated: \S+ ends at byte \d+ of \d+"),
        (
            flip_a_bit,
            r"__0_1.distcp is corrupt at byte \d+, in \S+ \(data/0 has a wrong CRC-32\); copy the",
        ),
        (flip_a_bit_of_the_config, r"hf/config.json is corrupt: its CRC-32 is \w{8}; \w{8} was written"),
        (overwrite, r"__0_1.distcp is corrupt at byte \d+, in \S+"),
        (lambda folder: (folder / ".metadata").write_bytes(b"no pickle"), ".metadata is corrupt"),
        (lambda folder: (folder / "metadata.json").unlink(), "is not a Megatron checkpoint"),
        (change_config(hidden_size=192), r"has shape \(\d+, 96\); config.json implies \(\d+, 192\)"),
        (change_config(num_hidden_layers=5, layer_types=None), r"does not fit this model: it lacks decoder.layers.8"),
        (change_config(vocab_size=300), r"has shape \(127, 96\); config.json implies \(300, 96\)"),
        (change_header, r"the files of \S+ lack model.layers.0.self_attn.k_proj.bias; they belong to another model"),
    ],
    ids=[
        "no file",
        "truncated",
        "a bit",
        "a bit of the config",
        "overwritten",
        "no metadata",
        "no checkpoint",
        "hidden size",
        "layers",
        "vocabulary",
        "headers",
    ],
)
def test_a_damaged_checkpoint_is_refused_before_anything_appears(change, message, models, tmp_path, megatron):
    broken = spoil(megatron, tmp_path / "broken", change)
    with pytest.raises(RankFailed) as error:
        run_ranks(back, 1, broken, tmp_path / "out", {})
    assert re.search(message, str(error.value)), str(error.value)[-500:]
    assert [file.name for file in tmp_path.iterdir()] == ["broken"]


@pytest.fixture(scope="module")
def megatron(models, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("megatron") / "qwen2"
    run_ranks(there, 1, models / "qwen2", folder, {})
    return folder


def test_ranks_that_do_not_fail_say_which_one_did(models, tmp_path, megatron):
    """Only the second stage reads the damaged part."""
    broken = spoil(megatron, tmp_path / "broken", truncate)
    with pytest.raises(RankFailed, match=r"rank 1.*truncated"):
        run_ranks(back, 2, broken, tmp_path / "out", dict(pp=2))
    assert [file.name for file in tmp_path.iterdir()] == ["broken"]


def test_inspect_shows_what_megatron_has_of_a_model(models, megatron, capfd):
    assert run_ranks(run_tool, 1, "inspect", megatron, "--json") == [0]
    found = json.loads(capfd.readouterr().out)
    source = {
        name: tensor for file in (models / "qwen2").glob("*.safetensors") for name, tensor in load_file(file).items()
    }
    assert found["kind"] == "Megatron distributed checkpoint" and found["facts"]["model_type"] == "qwen2"
    rows = {row["name"]: row for row in found["tensors"]}
    assert (
        rows["embedding.word_embeddings.weight"]["shape"] == [127, 96]
        and rows["output_layer.weight"]["dtype"] == "bfloat16"
    )
    assert rows["decoder.layers.1.mlp.linear_fc1.weight"]["where"] == "2 pieces"
    assert found["totals"]["all"][1] == sum(tensor.numel() for tensor in source.values())


def test_a_roundtrip_names_what_differs(models, tmp_path):
    source = models / "qwen3_moe"
    arguments = (
        "roundtrip",
        source,
        "--manifest",
        tmp_path / "m.json",
        "--scratch",
        tmp_path,
        "--tp",
        2,
        "--ep",
        2,
        "--etp",
        1,
    )
    assert run_ranks(run_tool, 2, *arguments) == [0, 0]
    manifest = json.loads((tmp_path / "m.json").read_text())
    assert manifest["identical"] and len(manifest["files"]) == len(list(source.glob("*.safetensors"))) + 1
    assert run_ranks(roundtrip_that_changes, 1, *arguments[:6]) == [1]
    manifest = json.loads((tmp_path / "m.json").read_text())
    assert not manifest["identical"]
    first, *_, last = manifest["differences"]
    assert (
        "model.norm.weight (model-" in first and "sha256 changed from" in first and last.endswith(": the files differ")
    )
    assert [file.name for file in tmp_path.iterdir()] == ["m.json"]


def roundtrip_that_changes(*arguments) -> int:
    """Run the round trip with a way back that changes one number."""
    original = Writer._write

    def write(self, name, tensor):
        if name == "model.norm.weight":
            tensor = tensor.clone()
            tensor[3] += 1
        return original(self, name, tensor)

    Writer._write = write
    return run_tool(*arguments)
