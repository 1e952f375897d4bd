"""Model files during an export: the file of each tensor, and how the next attempt uses an interrupted one."""

import json
import os
from collections import namedtuple

import pytest
import torch
from safetensors.torch import load_file

from megagrpo.config import ParallelSection
from megagrpo.families.weight_sources import INDEX, SINGLE
from megagrpo.platform.process.progress_hook import SILENT_TASK
from megagrpo.weights.bridge import conversion, hf_files
from megagrpo.weights.bridge.conversion import _unfinished
from megagrpo.weights.bridge.hf_files import File, Files, Writer, carry, copy_side_files, files_of, new_files, rounding
from megagrpo.weights.files import partial_files as unfinished
from megagrpo.weights.files.partial_files import Journal, Unfinished
from megagrpo.weights.files.tensor_files import make_header
from tests.unit.for_each import for_each

TENSORS = {name: torch.rand(5, 4) for name in "abcd"}
SHAPES = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in TENSORS.items()}


class TwoRanks:
    """A layout whose other rank always does the same as this one."""

    world_rank, world_size, parallel = 0, 2, ParallelSection()

    def all_gather_objects(self, obj):
        return [obj, obj]

    def all_reduce(self, values, reduction="sum"):
        return 2 * values if reduction == "sum" else values

    def broadcast_object(self, obj, source=0):
        return obj


def test_a_file_takes_as_many_tensors_as_its_limit_allows():
    files = new_files(SHAPES, limit=2 * 80)
    assert [list(file.entries) for file in files.files] == [["a", "b"], ["c", "d"]]
    index = json.loads(files.index)
    assert (
        index["metadata"] == {"total_size": 4 * 80} and index["weight_map"]["c"] == "model-00002-of-00002.safetensors"
    )
    assert new_files(SHAPES).index is None and [file.name for file in new_files(SHAPES).files] == [SINGLE]


def test_files_without_some_tensors_keep_their_metadata_and_update_the_total_size():
    headers = [
        File(f"{i}.safetensors", make_header({n: SHAPES[n] for n in names}, {"made": "by me"}))
        for i, names in enumerate(("abc", "d"))
    ]
    index = dict(
        metadata=dict(total_size=4 * 80, note="mine"),
        weight_map={n: "0.safetensors" if n in "abc" else "1.safetensors" for n in "abcd"},
    )
    files = Files(tuple(headers), json.dumps(index).encode())
    assert files.only("abcd") is files
    left = files.only("bc")
    assert [(file.name, list(file.entries)) for file in left.files] == [("0.safetensors", ["b", "c"])]
    assert json.loads(left.files[0].header)["__metadata__"] == {"made": "by me"}
    assert json.loads(left.index) == dict(
        metadata=dict(total_size=2 * 80, note="mine"), weight_map={n: "0.safetensors" for n in "bc"}
    )


def test_files_in_another_dtype_keep_their_names_and_a_bias_that_selects_experts_keeps_its_bits():
    bias = "mlp.gate.e_score_correction_bias"
    shapes = {"a": (torch.bfloat16, (4,)), bias: (torch.float32, (2,)), "b": (torch.float32, (3,))}
    files = new_files(shapes, limit=16)
    narrow, wide = files.in_dtype(torch.float16), files.in_dtype(torch.float32)
    assert [entry.dtype for entry in narrow.entries.values()] == [torch.float16, torch.float32, torch.float16]
    assert [entry.dtype for entry in wide.entries.values()] == [torch.float32] * 3
    assert (
        [file.name for file in narrow.files]
        == [file.name for file in wide.files]
        == [file.name for file in files.files]
    )
    assert [json.loads(each.index)["metadata"]["total_size"] for each in (files, narrow, wide)] == [
        8 + 8 + 12,
        8 + 8 + 6,
        16 + 8 + 12,
    ]
    assert wide.in_dtype(torch.float32) is wide


def test_a_line_says_which_dtypes_values_were_rounded_to_and_what_keeps_every_bit(tmp_path):
    exact, not_exact = torch.tensor([1.0, -0.5]), torch.tensor([1.0, 1 + 2.0**-12])
    files = new_files({"a": (torch.bfloat16, (2,)), "b": (torch.bfloat16, (2,)), "c": (torch.float32, (2,))})
    with Writer(tmp_path, files) as writer:
        writer.write("a", exact)
        writer.write("c", not_exact)
        assert rounding(writer.rounded, "--dtype") is None
        writer.write("b", not_exact)
    assert rounding(writer.rounded, "--dtype") == "rounded to bfloat16 (--dtype); --dtype float32 keeps every bit"
    pairs = {(torch.bfloat16, torch.float16)}
    assert rounding(pairs, "x") == "rounded to float16 (x); --dtype bfloat16 keeps every bit"
    pairs |= {(torch.float64, torch.bfloat16)}
    assert rounding(pairs, "x") == "rounded to bfloat16, float16 (x)"


def test_a_value_beyond_the_range_of_the_dtype_is_refused_by_name(tmp_path):
    with Writer(tmp_path, new_files({"a": (torch.float16, (2, 2))})) as writer:
        with pytest.raises(
            ValueError, match=r"^a holds 70000 at \[1, 0\], beyond the 65504 of float16; choose float32 or bfloat16"
        ):
            writer.write("a", torch.tensor([[1.0, 2.0], [70000.0, 0.0]]))
        with pytest.raises(ValueError, match=r"^a holds inf at \[0, 1\]; these weights are broken"):
            writer.write("a", torch.tensor([[1.0, float("inf")], [70000.0, 0.0]]))


@pytest.mark.parametrize("keys", [["dtype"], ["torch_dtype"], ["dtype", "torch_dtype"], []])
def test_config_json_names_the_dtype_of_the_tensors(tmp_path, keys):
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    raw = {"model_type": "llama"} | dict.fromkeys(keys, "bfloat16")
    (source / "config.json").write_text(json.dumps(raw))
    copy_side_files(source, target)
    assert json.loads((target / "config.json").read_text()) == raw
    copy_side_files(source, target, torch.float32)
    assert json.loads((target / "config.json").read_text()) == raw | dict.fromkeys(keys or ["torch_dtype"], "float32")


def test_tensors_are_written_in_any_order_in_parts_and_where_the_system_takes_few_bytes_at_a_time(
    monkeypatch, tmp_path
):
    monkeypatch.setattr(hf_files, "_ROWS", 32)  # two rows
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[:7], at))
    tensors = TENSORS | {"scalar": torch.tensor(3.0), "none": torch.zeros(0, 4)}
    files = new_files({name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()})
    with Writer(tmp_path, files, copies={"d": "a"}) as writer:
        assert [writer.write(name, tensors[name]) for name in ("scalar", "c", "none", "a", "b")] == [4, 80, 0, 160, 80]
    found = load_file(tmp_path / SINGLE)
    assert found.keys() == tensors.keys() and torch.equal(found["d"], TENSORS["a"])
    assert all(torch.equal(found[name], tensors[name]) for name in ("a", "b", "c", "scalar", "none"))


def test_an_earlier_attempts_bytes_stay_take_no_more_space_and_what_it_had_too_much_goes(monkeypatch, tmp_path):
    with Writer(tmp_path, new_files(SHAPES)) as writer:
        for name, tensor in TENSORS.items():
            writer.write(name, tensor)
    with open(tmp_path / SINGLE, "ab") as file:
        file.write(b"more")
    monkeypatch.setattr(unfinished.shutil, "disk_usage", lambda path: namedtuple("usage", "free")(0))
    with Writer(tmp_path, new_files(SHAPES)):
        pass
    assert all(torch.equal(tensor, TENSORS[name]) for name, tensor in load_file(tmp_path / SINGLE).items())
    with pytest.raises(OSError, match=f"not enough disk space for {tmp_path}: 0.00 GB more needed, 0.00 GB free"):
        Writer(tmp_path, Files((File("other.safetensors", make_header(SHAPES)),), None))
    assert [file.name for file in tmp_path.iterdir()] == [SINGLE] and not (tmp_path / INDEX).exists()


def test_a_line_of_the_journal_that_a_kill_cut_short_is_forgotten(tmp_path):
    path = tmp_path / "journal"
    journal = Journal(path)
    journal.write(["a", {"b": 1}])
    journal.close()
    with open(path, "ab") as file:
        file.write(b'{"c": ')
    journal = Journal(path)
    assert journal.lines == ["a", {"b": 1}]
    journal.write(["d"])
    journal.close()
    assert Journal(path).lines == ["a", {"b": 1}, "d"]


def test_what_was_left_for_another_purpose_is_cleared_and_what_all_ranks_need_must_fit(monkeypatch, tmp_path):
    out = tmp_path / "out"
    first = Unfinished(out, TwoRanks(), dict(of="this"))
    first.journal.write(["done"])
    (first.path / "part").write_text("bytes")
    os.close(first._lock)  # killed
    second = Unfinished(out, TwoRanks(), dict(of="this"))
    assert second.journal.lines == ["done"] and (second.path / "part").exists()
    os.close(second._lock)
    third = Unfinished(out, TwoRanks(), dict(of="that"))
    assert third.journal.lines == [] and not (third.path / "part").exists()
    monkeypatch.setattr(unfinished.shutil, "disk_usage", lambda path: namedtuple("usage", "free")(10**9))
    third.check_space(500_000_000)
    with pytest.raises(OSError, match=r"not enough disk space for .*out\.partial: 1\.20 GB more needed, 1\.00 GB free"):
        third.check_space(600_000_000)
    third.publish()
    assert list(out.iterdir()) == []


@pytest.mark.parametrize("what", ["a folder of the user", "a link to somebody's folder", "a file"])
def test_a_partial_folder_that_no_conversion_made_stays(what, tmp_path):
    theirs, partial = tmp_path / "theirs", tmp_path / ".out.partial"
    theirs.mkdir()
    (theirs / "notes").touch()
    if what == "a file":
        partial.touch()
    elif what == "a folder of the user":
        theirs.rename(partial)
        theirs = partial
    else:
        partial.symlink_to(theirs)
    with pytest.raises(
        ValueError, match=r"\.out\.partial was not made by this command; rename it, or name another folder than .*out"
    ):
        Unfinished(tmp_path / "out", TwoRanks(), dict(of="this"))
    assert (theirs / "notes").exists() and os.path.lexists(partial)


@pytest.mark.parametrize("purpose", ["this", "that"])
def test_a_kill_while_files_of_another_purpose_are_cleared_leaves_files_for_no_purpose(purpose, tmp_path):
    first = Unfinished(tmp_path / "out", TwoRanks(), dict(of="this"))
    first.journal.write(["done"])
    (first.path / "part").symlink_to(tmp_path)
    os.close(first._lock)
    pid = os.fork()
    if not pid:
        unfinished.remove = lambda path: os._exit(0)
        Unfinished(tmp_path / "out", TwoRanks(), dict(of="that"))
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    again = Unfinished(tmp_path / "out", TwoRanks(), dict(of=purpose))
    assert again.journal.lines == [] and not os.path.lexists(again.path / "part") and tmp_path.exists()


def left_behind(out, layout, source, **to):
    """The tensors that an interrupted attempt finds from earlier attempts."""
    with pytest.raises(KeyboardInterrupt), _unfinished(out, layout, source, **to) as folder:
        found = list(folder.journal.lines)
        folder.journal.write(["a"])
        raise KeyboardInterrupt
    os.close(folder._lock)
    return found


def test_an_attempt_goes_on_from_the_same_files_in_the_same_layout_alone(tmp_path):
    out, source, layout = tmp_path / "out", tmp_path / "source", TwoRanks()
    source.mkdir()
    (source / "model.safetensors").write_text("numbers")
    assert left_behind(out, layout, source) == [] and left_behind(out, layout, source) == ["a"]
    layout.world_size = 4
    for size, value in dict(ranks=4, tp=4, pp=4, vpp=4, pipeline_layers=[4], ep=4, etp=2).items():
        layout.parallel = layout.parallel.model_copy(update={} if size == "ranks" else {size: value})
        assert (left_behind(out, layout, source), left_behind(out, layout, source)) == ([], ["a"]), size
    assert (left_behind(out, layout, source, dtype=torch.float16), left_behind(out, layout, source)) == ([], [])
    (source / "model.safetensors").write_text("other numbers")
    assert (left_behind(out, layout, source), left_behind(out, layout, source)) == ([], ["a"])
    stat = (source / "model.safetensors").stat()
    os.utime(source / "model.safetensors", ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert left_behind(out, layout, source) == []
    with pytest.raises(OSError, match="broken"), _unfinished(out, layout, source):
        raise OSError("broken")
    assert [file.name for file in tmp_path.iterdir()] == ["source"]


def test_the_journal_names_only_what_the_disk_holds_for_good(monkeypatch, tmp_path):
    done = []
    monkeypatch.setattr(conversion, "_COMMIT", 0)
    monkeypatch.setattr(os, "fdatasync", lambda fd: done.append("disk"))
    monkeypatch.setattr(Journal, "write", lambda self, names: done.extend(names))
    folder = Unfinished(tmp_path / "out", TwoRanks(), {})
    files = new_files(SHAPES)
    with Writer(tmp_path, files) as writer:
        conversion._write_tensors(iter(TENSORS.items()), folder, files, writer, set(), SILENT_TASK)
    os.close(folder._lock)
    assert done == ["disk", "a", "disk", "b", "disk", "c", "disk", "d"]


def test_named_chat_templates_are_copied_and_the_index_of_other_weights_is_not(tmp_path):
    """Other weights than safetensors may lie in the same folder, with an index of their own."""
    from transformers.utils.hub import CHAT_TEMPLATE_DIR

    copied = {"chat_template.jinja", f"{CHAT_TEMPLATE_DIR}/tool_use.jinja", "tokenizer_config.json"}
    source, target = tmp_path / "source", tmp_path / "target"
    for name in [*copied, "pytorch_model.bin.index.json", INDEX, "onnx/config.json"]:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(name)
    target.mkdir()
    for _ in range(2):  # a killed attempt may have copied some files
        copy_side_files(source, target)
    found = {str(file.relative_to(target)): file.read_text() for file in target.rglob("*") if file.is_file()}
    assert found == {name: name for name in copied}


def test_another_dtype_is_named_for_the_text_model_and_not_for_its_tower(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    for folder in (source, target):
        folder.mkdir()
    inner, tower = {"model_type": "gemma3_text", "dtype": "bfloat16"}, {"dtype": "bfloat16"}
    raw = {"model_type": "gemma3", "torch_dtype": "bfloat16", "text_config": inner, "vision_config": tower}
    (source / "config.json").write_text(json.dumps(raw))
    (source / "preprocessor_config.json").write_text("{}")
    copy_side_files(source, target, torch.float32)
    written = json.loads((target / "config.json").read_text())
    assert written == raw | {"torch_dtype": "float32", "text_config": inner | {"dtype": "float32"}}
    assert (target / "preprocessor_config.json").is_file()


def test_another_dtype_is_named_for_the_text_model_of_a_thinker(tmp_path):
    folders = source, target = tmp_path / "source", tmp_path / "target"
    inner, talker = {"dtype": "bfloat16", "quantization_config": {"bits": 4}}, {"dtype": "bfloat16"}
    raw = {
        "dtype": "bfloat16",
        "thinker_config": {"text_config": inner, "audio_config": talker},
        "talker_config": talker,
    }
    for folder in folders:
        folder.mkdir()
    (source / "config.json").write_text(json.dumps(raw))
    (source / "spk_dict.pt").write_text("voices")
    copy_side_files(source, target, torch.float32)
    assert (target / "spk_dict.pt").read_text() == "voices"
    thinker = {"text_config": {"dtype": "float32"}, "audio_config": talker}
    assert json.loads((target / "config.json").read_text()) == raw | {"dtype": "float32", "thinker_config": thinker}


def test_code_of_the_models_own_goes_with_its_config(tmp_path):
    classes = {"AutoConfig": "configuration_mine.MineConfig", "AutoModelForCausalLM": "modeling_mine.LlamaForCausalLM"}
    elsewhere = {"AutoTokenizer": ["owner/mine--tokenization_mine.MineTokenizer", None]}
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps({"model_type": "llama", "auto_map": classes | elsewhere}))
    for name in ("configuration_mine.py", "modeling_mine.py", "helper.py"):
        (source / name).write_text("raise SystemExit  # never run\n")
    (tmp_path / "whole").mkdir()
    copy_side_files(source, tmp_path / "whole")
    assert {file.name: file.read_bytes() for file in (tmp_path / "whole").iterdir()} == {
        file.name: file.read_bytes() for file in source.iterdir()
    }
    (source / "modeling_mine.py").unlink()
    (tmp_path / "lacking").mkdir()
    copy_side_files(source, tmp_path / "lacking")
    assert json.loads((tmp_path / "lacking/config.json").read_text()) == {"model_type": "llama"}
    carry(source, None, tmp_path / "lacking")  # the side files that a checkpoint keeps
    assert "auto_map" not in json.loads((tmp_path / "lacking/config.json").read_text())


@for_each(
    ("link", "target", "taken"),
    [
        ("x.json", "../secret", False),
        ("tokenizer.json", "/etc/passwd", False),
        ("additional_chat_templates/a.jinja", "../../secret", False),
        ("x.json", "below/file", True),
        ("x.json", "../../blobs/file", True),
        ("x.json", "../../blobs/../refs", False),
        ("x.json", "absent", None),
    ],
)
def test_no_link_brings_a_file_from_elsewhere_into_a_copy(link, target, taken, tmp_path):
    folder = tmp_path / "models--a--b" / "snapshots" / "123"
    for file in ("below/file", "../../blobs/file", "../../refs", "../secret"):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(file)
    (folder / link).parent.mkdir(exist_ok=True)
    (folder / link).symlink_to(target)
    (tmp_path / "out").mkdir()
    if taken is False:
        for read in (lambda: copy_side_files(folder, tmp_path / "out"), lambda: files_of(folder)):
            with pytest.raises(ValueError, match=r"model: .* is a link to .*, outside of the folder; copy the model's"):
                read()
    else:
        files_of(folder)
        copy_side_files(folder, tmp_path / "out")
        assert (tmp_path / "out" / link).is_file() is bool(taken)
