"""The scripts of checkpoints_tools start from any folder, and no script shadows a module of Python."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

TOOLS = Path(__file__).parents[3] / "checkpoints_tools"
SCRIPTS = sorted(path.name for path in TOOLS.glob("*.py") if "__main__" in path.read_text())


def run(name: str, *arguments, folder: Path) -> subprocess.CompletedProcess:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, os.path.relpath(TOOLS / name, folder), *map(str, arguments)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def test_no_tool_has_the_name_of_a_module_of_the_standard_library():
    assert not {path.stem for path in TOOLS.glob("*.py")} & sys.stdlib_module_names


def test_show_lists_the_tensors_of_a_folder(tmp_path):
    """Start the script in its own folder, which Python searches first."""
    save_file({"a.weight": torch.ones(3, 2, dtype=torch.bfloat16), "b": torch.ones(5)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(dict(model_type="llama", num_hidden_layers=7)))
    done = run("show.py", tmp_path, "--json", folder=TOOLS)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["kind"] == "Hugging Face model" and found["facts"] == dict(model_type="llama", num_hidden_layers="7")
    row = dict(group="weights", where="model.safetensors")
    assert sorted(found["tensors"], key=lambda tensor: tensor["name"]) == [
        dict(name="a.weight", shape=[3, 2], dtype="bfloat16", nbytes=12) | row,
        dict(name="b", shape=[5], dtype="float32", nbytes=20) | row,
    ]
    assert found["totals"] == {"weights, float32": [1, 5, 20], "weights, bfloat16": [1, 6, 12], "all": [2, 11, 32]}
