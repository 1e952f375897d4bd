"""Who may import whom. A module may import its own folder and the levels below its own; the levels are those of the architecture."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "megagrpo").rglob("*.py"))
LEVELS = [
    {"config", "config_io", "types", "boxes", "scratch", "parent_death", "run_lock", "stop_signals", "terminal"},
    {"algorithms", "rewards", "data", "parallel", "families"},
    {"policy", "bridge", "rollout", "console"},
    {"weight_sync", "checkpoint", "metrics", "dump", "multi_turn", "look_ahead", "time_limit", "alarms"},
    {"collect", "serving", "adapter_sync"},
    {"draw", "evaluation", "generate", "serve"},
    {"trainer", "plan", "verify", "report", "audit"},
    {"train", "__main__"},
]
MAX_LINES = 420
# Within a level, in one direction only: the bridge knows the model's shape, vLLM's side knows the bridge's boxes.
# `config` and `config_io` are one room: `config_io` makes what `config.problems` defines.
SIDEWAYS = {("bridge", "policy"), ("rollout", "bridge"), ("__main__", "train"), ("verify", "plan")}
SIDEWAYS |= {("config", "config_io"), ("config_io", "config")}
MEGATRON = {"parallel", "policy", "bridge", "checkpoint"}
LIGHT = {"config": {"pydantic", "yaml"}, "config_io": {"yaml", "pydantic", "pydantic_core"}}


def room(path: Path) -> str:
    """The folder or the top-level module of a file of the package."""
    return path.relative_to(ROOT / "megagrpo").parts[0].removesuffix(".py")


def level(name: str) -> int:
    return next(i for i, rooms in enumerate(LEVELS) if name in rooms)


def imports(path: Path) -> set[str]:
    """Every absolute dotted name that a file imports, at its top or inside a function."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the arrows"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def own(names: set[str]) -> set[str]:
    """The rooms of this package among imported names."""
    return {name.split(".")[1] for name in names if name.startswith("megagrpo.") and name.split(".")[1] != "__version__"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_arrow_points_down(path):
    here = room(path)
    if here == "__init__":
        assert own(imports(path)) == set()
        return
    for there in own(imports(path)) - {here}:
        assert level(there) < level(here) or (here, there) in SIDEWAYS, f"{path.name}: {here} must not import {there}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_megatron_and_vllm_stay_in_their_rooms(path):
    names, here = imports(path), room(path)
    for package, rooms in {"megatron": MEGATRON, "vllm": {"rollout"}}.items():
        if any(name.split(".")[0] == package for name in names):
            assert here in rooms, f"{path.name} imports {package}"
    if any("parallel_state" in name for name in names):
        assert here == "parallel", f"{path.name} touches the parallel state"


@pytest.mark.parametrize("name", LIGHT)
def test_the_config_needs_pydantic_and_yaml_only(name):
    files = [path for path in FILES if room(path) == name]
    outside = {n.split(".")[0] for path in files for n in imports(path)} - set(sys.stdlib_module_names) - {"megagrpo"}
    assert files and outside <= LIGHT[name]


def test_nothing_in_the_package_imports_its_tools_or_tests():
    for path in FILES:
        assert not {n.split(".")[0] for n in imports(path)} & {"launch", "checkpoints_tools", "tests", "benchmarks"}


def test_the_algorithm_loop_speaks_of_neither_megatron_nor_vllm():
    for path in FILES:
        if room(path) == "trainer":
            assert not {n.split(".")[0] for n in imports(path)} & {"megatron", "vllm"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_stay_short_enough_to_read(path):
    assert len(path.read_text().splitlines()) <= MAX_LINES
