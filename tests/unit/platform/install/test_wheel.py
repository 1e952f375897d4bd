"""The wheel and the sdist that the build backend makes of the repository's files, without a network."""

import configparser
import email
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

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


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_wheel_holds_every_file_of_the_package_and_every_config(wheel):
    expected = {name for name in files() if name.startswith("megagrpo/")}
    expected |= {f"megagrpo/{name}" for name in files() if name.startswith("configs/")}
    assert expected >= {
        "megagrpo/configs/quickstart.yaml",
        "megagrpo/platform/launch/train.sbatch",
        "megagrpo/py.typed",
    }
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
Path("mine.yaml").write_text("defaults: megagrpo:quickstart\\n")
folder = shipped_configs()
loaded = [load_config(path, []).run.name for path in sorted(folder.glob("*.yaml"))]
kinds = [constraints(kind).is_file() for kind in ("cpu", "gpu")]
mine = load_config("mine.yaml", []).algorithm.loss_type
print(json.dumps([str(folder), loaded, mine, all_requirements(), kinds, "torch" in sys.modules]))
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
    folder, loaded, loss, required, constraints, torch = json.loads(done.stdout)
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


def test_the_sdist_makes_the_same_wheel_and_holds_the_tests(source, wheel, tmp_path):
    with tarfile.open(build("sdist", source, tmp_path)) as archive:
        archive.extractall(tmp_path, filter="data")
    unpacked = tmp_path / f"megagrpo-{PROJECT['version']}"
    assert [name for name in files() if not (unpacked / name).is_file()] == []
    assert contents(build("wheel", unpacked, tmp_path)) == contents(wheel)


def test_an_editable_install_reads_modules_and_configs_of_the_checkout(source, tmp_path):
    inside = contents(build("editable", source, tmp_path))
    (finder,) = [content.decode() for name, content in inside.items() if name.endswith("_finder.py")]
    assert f"'megagrpo': '{source / 'megagrpo'}'" in finder
    assert not [name for name in inside if name.startswith("megagrpo/")]
