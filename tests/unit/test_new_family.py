"""`checkpoints_tools/new_family.py`: a draft has the table of the finished family, and names what a person has to decide."""

import json
import subprocess
import sys

import pytest

from checkpoints_tools.new_family import draft_family, main
from megagrpo.__main__ import main as megagrpo
from megagrpo.families.family_index import FAMILIES
from megagrpo.families.hf_config import parse_hf_config, table_of
from megagrpo.families.shared.family import FIXED, Family
from tests.family_examples import RELEASES, Example
from tests.unit.for_each import for_each


def family_in(text: str) -> Family:
    """The family that the text of a file defines."""
    names: dict = {}
    exec(compile(text, "draft", "exec"), names)
    return names["FAMILY"]


@for_each("kind", RELEASES)
def test_a_draft_and_its_tasks_have_the_tensors_of_the_finished_family(kind):
    draft, finished = draft_family(RELEASES[kind]), FAMILIES[kind]
    drafted, hf = family_in(draft.text), parse_hf_config(RELEASES[kind])
    assert drafted.model_type == kind and drafted.architecture in (finished.architecture, *finished.classes)
    example = Example(**json.loads(draft.example))
    assert example.release == RELEASES[kind] and [*example.cases] == [kind]
    ours, theirs = (
        {name for rule in table.values() for name in rule.names} for table in (drafted.table(hf), table_of(hf))
    )
    assert (ours - {*draft.missing_tensors}) | {*draft.unknown_tensors} == theirs
    read = {key for key in finished.keys if RELEASES[kind].get(key) is not None} - {"layer_types", *FIXED}
    assert read <= {*draft.unknown_keys, *drafted.keys}, "keys that the finished file reads"


def test_the_script_writes_the_file_once_and_lists_what_is_left(tmp_path, capsys):
    raw = RELEASES["olmo3"] | dict(model_type="olmo3", some_scale=2.0)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    out = tmp_path / "olmo3.py"
    assert main([str(tmp_path), "--out", str(out)]) == 0
    told = capsys.readouterr().out
    assert "POST_NORMED | QK_NORM" in told and "read, ignore or fix the key some_scale=2.0" in told
    assert "compare the model in modular_olmo3.py" in told and "tests.prove_family olmo3" in told
    assert "# TODO: read, ignore or fix the key some_scale=2.0" in out.read_text()
    assert json.loads(out.with_suffix(".json").read_text())["release"] == raw
    assert main([str(tmp_path), "--out", str(out)]) == 2
    assert f"{out} exists; name a new file" in capsys.readouterr().err
    out.unlink()
    assert main([str(tmp_path), "--out", str(out)]) == 2
    assert f"{out.with_suffix('.json')} exists; name a new file" in capsys.readouterr().err
    out.touch()
    assert main([str(tmp_path)]) == 2
    assert "model_type olmo3 is supported" in capsys.readouterr().err
    assert main([str(out)]) == 2
    assert "is neither a folder nor a config.json" in capsys.readouterr().err


def test_of_a_multimodal_model_the_text_model_is_drafted_and_the_line_for_the_whole_is_told(tmp_path, capsys):
    inner, out = RELEASES["olmo3"] | dict(model_type="olmo3"), tmp_path / "text.py"
    whole = dict(model_type="olmo_vl", architectures=["OlmoForVision"], vision_config={}, text_config=inner)
    (tmp_path / "config.json").write_text(json.dumps(whole))
    line = 'wrappers=(Wrapper("olmo_vl", "OlmoForVision"),),'
    assert main([str(tmp_path), "--out", str(out)]) == 2
    assert f"its text model olmo3 is supported; add to its file: {line}" in capsys.readouterr().err
    whole["text_config"] = dict(model_type="helium", num_hidden_layers=4, vocab_size=100, hidden_size=64) | dict(
        num_attention_heads=4, num_key_value_heads=2, intermediate_size=96
    )
    (tmp_path / "config.json").write_text(json.dumps(whole))
    assert main([str(tmp_path), "--out", str(out)]) == 0
    assert f"add {line}" in capsys.readouterr().out and '    "helium",' in out.read_text()


@pytest.mark.full
def test_a_type_that_transformers_does_not_know_is_an_error(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(dict(model_type="mine", num_hidden_layers=2)))
    command = [sys.executable, "checkpoints_tools/new_family.py", str(tmp_path), "--out", str(tmp_path / "mine.py")]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 2 and "Traceback" not in ran.stderr
    assert "transformers builds no causal language model of model_type 'mine'" in ran.stderr
    assert not (tmp_path / "mine.py").exists()


def test_the_command_of_older_versions_names_the_script(capsys):
    assert megagrpo(["new-family", "config.json"]) == 2
    assert capsys.readouterr().err.startswith(
        "megagrpo: new-family is a script of a clone: python checkpoints_tools/new_family.py;"
    )
