"""Damaged model files: each kind of damage is detected before any file is replaced, and the error names file, tensor
and fix."""

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file

from megagrpo.families.hf_config import parse_hf_config
from megagrpo.families.shared.blocks import Block
from megagrpo.families.shared.boxes import whole
from megagrpo.families.weight_sources import INDEX, SINGLE
from megagrpo.weights.bridge import load
from megagrpo.weights.bridge.load import Checkpoint
from megagrpo.weights.files.tensor_files import SAFETENSORS_DTYPES, TensorFile, make_header, parse_header
from tests.unit.for_each import for_each

SIZES = dict(
    num_hidden_layers=1, hidden_size=8, num_attention_heads=2, num_key_value_heads=1, intermediate_size=6, vocab_size=11
)
CONFIG = parse_hf_config(dict(model_type="llama", **SIZES))
Q, EMBEDDING = "model.layers.0.self_attn.q_proj.weight", "model.embed_tokens.weight"


@pytest.fixture
def folder(tmp_path):
    """A model in two files with an index."""
    layer = "model.layers.0."
    shapes = {layer + f"self_attn.{p}_proj.weight": (8 if p in "qo" else 4, 8) for p in "qkvo"}
    shapes |= {layer + f"mlp.{p}_proj.weight": (8, 6) if p == "down" else (6, 8) for p in ("gate", "up", "down")}
    shapes |= {layer + f"{n}_layernorm.weight": (8,) for n in ("input", "post_attention")}
    shapes |= {EMBEDDING: (11, 8), "lm_head.weight": (11, 8), "model.norm.weight": (8,)}
    tensors = {name: torch.rand(shape) for name, shape in shapes.items()}
    files = {
        "a.safetensors": [n for n in tensors if "layers" in n],
        "b.safetensors": [n for n in tensors if "layers" not in n],
    }
    for file, names in files.items():
        save_file({name: tensors[name] for name in names}, tmp_path / file)
    write_index(tmp_path, {name: file for file, names in files.items() for name in names})
    return tmp_path


def write_index(folder, weight_map):
    (folder / INDEX).write_text(json.dumps(dict(metadata=dict(total_size=1), weight_map=weight_map)))


def weight_map(folder):
    return json.loads((folder / INDEX).read_text())["weight_map"]


def block(name, *shape):
    return Block(name, shape, whole(shape), grid=shape, axis=0, at=0, count=shape[0])


def change(folder, file, **tensors):
    """Rewrite `file` with tensors replaced, or dropped where None is given."""
    opened = TensorFile(folder / file)
    found = {name: opened.tensor(name).clone() for name in opened.entries} | tensors
    save_file({name: tensor for name, tensor in found.items() if tensor is not None}, folder / file)


def refused(folder, *words):
    with pytest.raises(ValueError) as error:
        checkpoint = Checkpoint(folder)
        wanted = [block(Q, 8, 8), block(EMBEDDING, 11, 8)]
        checkpoint.check(wanted, CONFIG)
        for part in wanted:
            checkpoint.read(part)
    for word in words:
        assert word in str(error.value), (word, str(error.value))


def test_a_whole_folder_is_read_as_it_is(folder):
    checkpoint = Checkpoint(folder)
    checkpoint.check([block(Q, 8, 8)], CONFIG)
    assert torch.equal(checkpoint.read(block(Q, 8, 8)), TensorFile(folder / "a.safetensors").tensor(Q))


@pytest.mark.parametrize("left", [0, 5, 40, -400, -1])
def test_a_truncated_file_is_named_with_the_tensor_where_it_ends(folder, left):
    path = folder / "a.safetensors"
    path.write_bytes(path.read_bytes()[:left])
    refused(folder, str(path), "truncated", "download or copy the file again")
    if left < 0:
        refused(folder, f"inside model.layers.0.self_attn.{'v' if left == -1 else 'o'}_proj.weight")


def test_a_header_that_ends_beyond_the_file_or_is_no_json_is_named(folder):
    path = folder / "a.safetensors"
    good = path.read_bytes()
    path.write_bytes((2**40).to_bytes(8, "little") + good[8:])
    refused(folder, str(path), "end inside the header")
    path.write_bytes(good[:8] + b"x" + good[9:])
    refused(folder, str(path), "its header is not a JSON object")


def test_a_pointer_of_git_lfs_is_named_with_the_command_that_fetches_the_file(folder):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4965799096\n"
    (folder / "a.safetensors").write_text(pointer)
    refused(folder, f"{folder / 'a.safetensors'} is a git-lfs pointer, not weights; run `git lfs pull`")


def test_an_empty_shard_and_a_total_size_that_differs(folder):
    """The sum in the index is not read: published indexes have other numbers there."""
    index = json.loads((folder / INDEX).read_text())
    (folder / INDEX).write_text(json.dumps(index | {"metadata": {"total_size": 1}}))
    assert Checkpoint(folder).where == index["weight_map"]
    (folder / "a.safetensors").write_bytes(b"")
    refused(folder, f"{folder / 'a.safetensors'} is truncated or not a safetensors file: its 0 bytes end inside")


def test_bytes_after_the_last_tensor_are_damage(folder):
    with open(folder / "b.safetensors", "ab") as file:
        file.write(b"more")
    refused(folder, "b.safetensors", "4 bytes follow the last tensor")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (dict(dtype="F32", shape=[2], data_offsets=[4, 12]), "x starts at byte 4 of the data and not at 0"),
        (dict(dtype="F32", shape=[2], data_offsets=[0, 4]), r"x, F32 \[2\], takes 8 bytes and not 4"),
        (dict(dtype="F32", shape=[2], data_offsets=[8, 0]), "takes 8 bytes and not -8"),
        (dict(dtype="F32", shape=[-2], data_offsets=[0, -8]), "takes -8 bytes"),
        (dict(dtype="F32", data_offsets=[0, 4]), "its header describes x as"),
        (dict(dtype="Q4", shape=[2], data_offsets=[0, 1]), "x in f has dtype Q4, which is not one of F64"),
        ("no entry", "its header describes x as no entry"),
    ],
)
def test_offsets_that_contradict_shapes_are_found(entry, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        parse_header(json.dumps({"x": entry}), tmp_path.__class__("f"))


def test_headers_of_all_dtypes_come_back():
    tensors = {name.lower(): (dtype, (3, 2)) for name, dtype in SAFETENSORS_DTYPES.items()} | {
        "scalar": (torch.float32, ()),
        "none": (torch.int8, (0, 4)),
    }
    assert {n: (e.dtype, e.shape) for n, e in parse_header(make_header(tensors), SINGLE).items()} == tensors


def test_a_missing_file_is_named(folder):
    (folder / "b.safetensors").unlink()
    refused(folder, f"{folder} lacks b.safetensors, named in {INDEX}", "download the missing files")


def test_a_folder_in_place_of_a_file_counts_as_missing(folder):
    (folder / "b.safetensors").unlink()
    (folder / "b.safetensors").mkdir()
    refused(folder, f"{folder} lacks b.safetensors, named in {INDEX}")


def test_an_index_that_names_a_tensor_which_its_file_lacks_is_wrong(folder):
    change(folder, "a.safetensors", **{Q: None})
    refused(folder, f"names a.safetensors for {Q}, but the file lacks it")


def test_an_index_that_leaves_out_a_tensor_or_puts_it_elsewhere_is_wrong(folder):
    names = weight_map(folder)
    write_index(folder, {name: file for name, file in names.items() if name != Q})
    refused(folder, f"a.safetensors holds {Q}, which {INDEX} does not list for this file")


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": ["a.safetensors"]}', "{}"])
def test_an_index_of_another_form_is_corrupt(folder, text):
    (folder / INDEX).write_text(text)
    refused(folder, str(folder / INDEX), "is corrupt", "download it again")


@for_each("bad", [float("nan"), float("inf"), -float("inf")])
@for_each("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_weight_that_is_not_finite_is_named_with_its_index(folder, bad, dtype):
    q = torch.rand(8, 8).to(dtype)
    q[3, 5] = bad
    change(folder, "a.safetensors", **{Q: q})
    refused(
        folder,
        f"{Q} in {folder / 'a.safetensors'} holds {bad} at [3, 5]",
        "the weights are broken: use another checkpoint",
    )


def test_weights_of_another_shape_than_config_json_implies_are_refused(folder):
    change(folder, "b.safetensors", **{EMBEDDING: torch.rand(12, 8)})
    refused(folder, f"{EMBEDDING} in {folder / 'b.safetensors'} has shape (12, 8); config.json implies (11, 8)")


def test_a_head_that_is_not_there_may_be_tied(folder):
    change(folder, "b.safetensors", **{"lm_head.weight": None})
    write_index(folder, {name: file for name, file in weight_map(folder).items() if name != "lm_head.weight"})
    with pytest.raises(
        ValueError, match=r"lacks lm_head\.weight; if the embeddings are tied, set tie_word_embeddings to true"
    ):
        Checkpoint(folder).check([block("lm_head.weight", 11, 8)], CONFIG)


@pytest.mark.parametrize(
    ("tied", "head", "refused"),
    [
        (True, lambda embedding: embedding.clone(), False),
        (True, lambda embedding: embedding.double(), False),  # the same numbers
        (True, lambda embedding: embedding + (torch.arange(11) == 10)[:, None] * 2.0**-8, True),  # the last row alone
        (True, lambda embedding: embedding[:10], True),
        (False, lambda embedding: embedding + 1, False),
    ],
)
def test_a_head_beside_tied_embeddings_must_be_the_embeddings(folder, tied, head, refused, monkeypatch):
    monkeypatch.setattr(load, "_ROWS", 4)
    embedding = TensorFile(folder / "b.safetensors").tensor(EMBEDDING).clone()
    change(folder, "b.safetensors", **{"lm_head.weight": head(embedding).contiguous()})
    config = parse_hf_config(dict(model_type="llama", tie_word_embeddings=tied, **SIZES))
    if not refused:
        Checkpoint(folder).check_all(config)
        return
    with pytest.raises(
        ValueError, match=r"lm_head.weight in .*b.safetensors differs from .*; set tie_word_embeddings to false"
    ):
        Checkpoint(folder).check_all(config)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.uint8])
def test_quantized_weights_are_refused(folder, dtype):
    change(folder, "a.safetensors", **{Q: torch.ones(8, 8).to(dtype)})
    refused(folder, f"{Q} in {folder / 'a.safetensors'} is {dtype}, quantized; use the original weights")


def test_tensors_that_the_model_lacks_or_does_not_know_are_named(folder):
    refused_names = {"model.layers.0.extra.weight": torch.rand(2)}
    change(folder, "a.safetensors", **refused_names)
    write_index(folder, weight_map(folder) | dict.fromkeys(refused_names, "a.safetensors"))
    refused(folder, "holds model.layers.0.extra.weight, which this architecture does not use")
    shutil.rmtree(folder)
    folder.mkdir()
    save_file({EMBEDDING: torch.rand(11, 8)}, folder / SINGLE)
    refused(
        folder,
        f"lacks {Q}; config.json and the weights belong to different models, or are incomplete; download the folder "
        "again",
    )
    (folder / SINGLE).unlink()
    refused(folder, f"holds neither {SINGLE} nor {INDEX}")
