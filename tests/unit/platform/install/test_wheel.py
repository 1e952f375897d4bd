"""The wheel and the sdist that the build backend makes of the repository's files, without a network."""

import configparser
import email
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megagrpo.__main__ import main

REPOSITORY = Path(__file__).parents[4]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, 'build_' + sys.argv[1])(sys.argv[2]))"


def build(what: str, source: Path, target: Path) -> Path:
    """Run one hook of the build backend in `source`, as pip and uv do."""
    done = subprocess.run(
        [sys.executable, "-c", BUILD, what, str(target)], cwd=source, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return target / done.stdout.splitlines()[-1]


def files() -> list[str]:
    """The files of the repository that git does not ignore."""
    listing = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    return [name for name in listing.stdout.splitlines() if (REPOSITORY / name).is_file()]


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    for name in files():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory) -> Path:
    return build("wheel", source, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def sdist(source, tmp_path_factory) -> Path:
    """The folder that the sdist unpacks to."""
    folder = tmp_path_factory.mktemp("sdist")
    with tarfile.open(build("sdist", source, folder)) as archive:
        archive.extractall(folder, filter="data")
    return folder / f"megagrpo-{PROJECT['version']}"


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_wheel_holds_every_file_of_the_package_every_config_and_every_script_of_launch(wheel):
    expected = {name for name in files() if name.startswith("megagrpo/")}
    expected |= (
        {f"megagrpo/{name}" for name in files() if name.startswith(("configs/", "launch/"))}
        - {"megagrpo/launch/lock.py"}
        - {"megagrpo/launch/lock.py"}
    )
    assert expected >= set(
        (
            "megagrpo/configs/quickstart.yaml megagrpo/launch/train.sbatch megagrpo/launch/jobset.yaml "
            "megagrpo/launch/clusters/generic.yaml megagrpo/py.typed"
        ).split()
    )
    assert {name for name in contents(wheel) if ".dist-info/" not in name} == expected


def test_the_wheel_says_who_made_it_what_it_needs_and_how_it_starts(wheel):
    inside = contents(wheel)
    info = f"megagrpo-{PROJECT['version']}.dist-info"
    metadata = email.message_from_bytes(inside[f"{info}/METADATA"])
    assert (metadata["Name"], metadata["Version"], metadata["Author"]) == (
        "megagrpo",
        PROJECT["version"],
        "megagrpo developers",
    )
    assert metadata["License-Expression"] == "Apache-2.0" and f"{info}/licenses/LICENSE" in inside
    assert metadata["Description-Content-Type"] == "text/markdown" and "# megagrpo" in metadata.get_payload()
    assert set(metadata.get_all("Classifier")) == set(PROJECT["classifiers"]) and set(
        metadata["Keywords"].split(",")
    ) == set(PROJECT["keywords"])
    assert set(metadata.get_all("Provides-Extra")) == set(PROJECT["optional-dependencies"])
    points = configparser.ConfigParser()
    points.read_string(inside[f"{info}/entry_points.txt"].decode())
    assert (
        points["console_scripts"]["megagrpo"] == "megagrpo.__main__:main" and points["vllm.general_plugins"]["megagrpo"]
    )


LOOK = """
import json, sys
from pathlib import Path
from megagrpo.config import load_config
from megagrpo.config.io import shipped_configs
from megagrpo.platform.install.requirements import all_requirements, constraints
from megagrpo.cluster.launch.job import cluster_file
from megagrpo.cluster.launch.slurm import TRAIN_SCRIPT
Path("mine.yaml").write_text("defaults: megagrpo:quickstart\\n")
folder = shipped_configs()
loaded = [load_config(path, []).run.name for path in sorted(folder.glob("*.yaml"))]
kinds = [constraints(kind).is_file() for kind in ("cpu", "gpu")]
mine = load_config("mine.yaml", []).algorithm.loss_type
launch = [str(TRAIN_SCRIPT), str(cluster_file("generic"))]
print(json.dumps([str(folder), launch, loaded, mine, all_requirements(), kinds, "torch" in sys.modules]))
"""


def test_an_unpacked_wheel_finds_its_configs_and_requirements_in_an_empty_folder(wheel, tmp_path):
    unpacked, empty = tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(unpacked)
    environment = os.environ | {"PYTHONPATH": str(unpacked)}
    done = subprocess.run(
        [sys.executable, "-c", LOOK], cwd=empty, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    folder, launch, loaded, loss, required, constraints, torch = json.loads(done.stdout)
    inside = unpacked / "megagrpo" / "launch"
    assert launch == [str(inside / "train.sbatch"), str(inside / "clusters" / "generic.yaml")]
    assert folder == str(unpacked / "megagrpo" / "configs") and "quickstart" in loaded and loss == "dapo"
    assert constraints == [True, True] and not torch
    stated = {"": PROJECT["dependencies"], **PROJECT["optional-dependencies"]}
    assert {extra: len(set(texts)) for extra, texts in required.items()} == {
        extra: len(set(texts)) for extra, texts in stated.items()
    }
    assert {name(text) for texts in required.values() for text in texts} == {
        name(text) for texts in stated.values() for text in texts
    }


def name(requirement: str) -> str:
    """The package of a requirement, without extras and versions."""
    return requirement.split("[")[0].split("<")[0].split(">")[0].split("=")[0].split("!")[0].strip()


def test_the_sdist_makes_the_same_wheel_and_holds_the_tests(sdist, wheel, tmp_path):
    assert [name for name in files() if not (sdist / name).is_file()] == []
    assert contents(build("wheel", sdist, tmp_path)) == contents(wheel)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A folder with a tiny Llama and an adapter of one of its weights."""
    import transformers

    folder, sizes = tmp_path_factory.mktemp("model"), dict(hidden_size=16, intermediate_size=32, vocab_size=64)
    heads = dict(num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).save_pretrained(folder)
    (folder / "adapter").mkdir()
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    factors = {f"{name}.lora_A.weight": torch.ones(2, 16), f"{name}.lora_B.weight": torch.ones(16, 2)}
    save_file(factors, folder / "adapter" / "adapter_model.safetensors")
    described = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(described))
    return folder


TOOLS = """
import json, runpy, sys
for words in json.loads(sys.argv[1]):
    sys.argv = words
    try:
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as ended:
        assert not ended.code, words
import megagrpo
print(megagrpo.__file__)
"""


@pytest.mark.full
@pytest.mark.parametrize("tree", [pytest.param("clone", marks=pytest.mark.full), "sdist"])
def test_the_checkpoint_tools_work_without_an_installation_of_megagrpo(tree, model, tmp_path, request):
    """`-S` and PYTHONPATH give Python all installed packages except those in editable mode, such as megagrpo."""
    root = REPOSITORY if tree == "clone" else request.getfixturevalue("sdist")
    calls = [
        ["roundtrip.py", str(model), "--manifest", "manifest.json"],
        ["hf_to_megatron.py", str(model), "megatron"],
        ["megatron_to_hf.py", "megatron", "back"],
        ["merge_adapter.py", str(model / "adapter"), "merged", "--model", str(model)],
        ["show.py", "merged", "--tensors"],
        ["new_family.py", str(model), "--out", "drafted.py"],
    ]
    assert {words[0] for words in calls} == {path.name for path in (root / "checkpoints_tools").glob("*.py")}
    words = json.dumps([[str(root / "checkpoints_tools" / name), *rest] for name, *rest in calls])
    environment = os.environ | {"PYTHONPATH": sysconfig.get_path("purelib")}
    command = [sys.executable, "-S", "-c", TOOLS, words]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(root / "megagrpo" / "__init__.py")
    assert "model.layers.0.self_attn.q_proj.weight" in done.stdout
    start, back, merged = (
        load_file(folder / "model.safetensors") for folder in (model, tmp_path / "back", tmp_path / "merged")
    )
    assert all(torch.equal(back[name], tensor) for name, tensor in start.items())
    change = merged["model.layers.0.self_attn.q_proj.weight"] - start["model.layers.0.self_attn.q_proj.weight"]
    assert torch.allclose(change, torch.full((16, 16), 4.0), atol=1e-5)  # B A = 2, times alpha / r = 2


def test_a_checkpoint_tool_shows_its_own_name_in_the_help_of_its_command(capsys):
    assert main(["inspect", "--help"]) == 0
    expected = capsys.readouterr().out
    tool = REPOSITORY / "checkpoints_tools" / "show.py"
    done = subprocess.run([sys.executable, str(tool), "--help"], capture_output=True, text=True, timeout=60)
    assert done.stdout == expected.replace("usage: megagrpo inspect", "usage: show.py") and done.returncode == 0


def test_an_editable_install_reads_modules_and_configs_of_the_checkout(source, tmp_path):
    inside = contents(build("editable", source, tmp_path))
    (finder,) = [content.decode() for name, content in inside.items() if name.endswith("_finder.py")]
    assert f"'megagrpo': '{source / 'megagrpo'}'" in finder
    assert not [name for name in inside if name.startswith("megagrpo/")]
