"""Allowed imports. A module may import its own room and the rooms of the levels above its own in this list."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "megagrpo").rglob("*.py"))
LEVELS = [
    {"types", "config", "process", "install"},
    {"families", "algorithms", "data", "rewards", "device"},
    {"parallel", "transfer", "hub"},
    {"policy"},
    {"bridge"},
    {"records", "engine", "vllm_plugin"},
    {"servers", "weight_sync", "multi_turn"},
    {"rollout"},
    {"evaluation", "plan", "audit"},
    {"verify"},
    {"trainer", "report"},
    {"launch"},
    {"doctor"},
    {"commands"},
    {"api"},
    {"__main__"},
]
MAX_LINES = 420
# Names that users' servers load.
PUBLIC = {f"rollout/{name}.py" for name in ("access", "vllm_plugin", "vllm_worker")}
INSIDE_VLLM = "vllm_plugin"  # nothing imports it
PREPARES = "megagrpo.device"  # importing it prepares the device; megatron must be imported after it
PREPARED = {"device", "parallel", "policy", "bridge"}  # rooms whose `__init__` imports PREPARES first
IMPORTERS = {"megatron": PREPARED, "vllm": {INSIDE_VLLM}}
PARALLEL_STATE = {"parallel", "device"}
ONLY = {"config": {"pydantic", "pydantic_core", "yaml"}, "process": set(), "install": set()}
BESIDE_THE_PACKAGE = {"benchmarks"}


def inside(path: Path) -> Path:
    """A file of the package as a path below megagrpo/."""
    return path.relative_to(ROOT / "megagrpo")


def room(path: Path) -> str:
    """The folder or the top-level module of a file of the package."""
    return inside(path).parts[0].removesuffix(".py")


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


def against(path: Path) -> set[str]:
    """Rooms that a file imports against the order of levels."""
    here = room(path)
    return {there for there in own(imports(path)) - {here} if there == INSIDE_VLLM or level(there) >= level(here)}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_arrow_points_down(path):
    if room(path) == "__init__":
        assert own(imports(path)) == {"api", "config", "hub"}  # its names are imported when they are used: tests/unit/api/test_package.py
    elif str(inside(path)) not in PUBLIC:
        assert against(path) == set()


def test_every_room_has_a_level_and_only_public_names_are_left_out():
    assert {room(path) for path in FILES} - {"__init__"} == set().union(*LEVELS)
    assert {str(inside(path)) for path in FILES if room(path) == "rollout" and INSIDE_VLLM in own(imports(path))} <= PUBLIC
    assert all(len((ROOT / "megagrpo" / file).read_text().splitlines()) == 3 for file in PUBLIC)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_megatron_and_vllm_stay_in_their_rooms(path):
    names, here = imports(path), room(path)
    for package, rooms in IMPORTERS.items():
        if any(name.split(".")[0] == package for name in names):
            assert here in rooms, f"{path.name} imports {package}"
    if any("parallel_state" in name for name in names):
        assert here in PARALLEL_STATE, f"{path.name} touches the parallel state"


def module_level(path: Path) -> list[str]:
    """The names that a file imports outside of functions, in order; `from a import b` counts as a.b."""
    bodies, names = [ast.parse(path.read_text()).body], []
    for node in (node for body in bodies for node in body):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module != "__future__":
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            bodies += [inner for name in ("body", "orelse", "handlers", "finalbody") if (inner := getattr(node, name, None))]
    return names


@pytest.mark.parametrize("name", sorted(PREPARED - {"device"}))
def test_a_package_that_imports_megatron_prepares_the_device_first(name):
    assert module_level(ROOT / "megagrpo" / name / "__init__.py")[:1] == [PREPARES]


def test_tests_and_tools_import_megatron_inside_functions():
    scripts = [path for folder in ("tests", *sorted(BESIDE_THE_PACKAGE)) for path in sorted((ROOT / folder).rglob("*.py"))]
    assert len(scripts) > 100
    early = {str(path.relative_to(ROOT)) for path in scripts if any(name.split(".")[0] == "megatron" for name in module_level(path))}
    assert early == set()


@pytest.mark.parametrize("name", ONLY)
def test_the_config_needs_pydantic_and_yaml_only_and_processes_need_nothing(name):
    files = [path for path in FILES if room(path) == name]
    outside = {n.split(".")[0] for path in files for n in imports(path)} - set(sys.stdlib_module_names) - {"megagrpo"}
    assert files and outside <= ONLY[name]


def test_nothing_in_the_package_imports_its_tools_or_tests():
    for path in FILES:
        assert not {n.split(".")[0] for n in imports(path)} & {"launch", "tests", "benchmarks"}


def test_the_algorithm_loop_speaks_of_neither_megatron_nor_vllm():
    for path in FILES:
        if room(path) == "trainer":
            assert not {n.split(".")[0] for n in imports(path)} & {"megatron", "vllm"}


def test_one_module_removes_files_and_folders():
    """process/removal.py follows no link, does not recurse and raises nothing. Whatever else removes something is a text that runs in a
    sandbox."""
    removing = {"rmtree", "unlink", "rmdir", "removedirs", "TemporaryDirectory"}
    found = set()
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if called in ("os.remove", "shutil.move") or called.rpartition(".")[2] in removing:
                found.add((str(inside(path)), called))
    assert {path for path, _ in found} == {"process/removal.py"}, found


def test_unit_tests_are_in_the_folder_of_their_room():
    folders = {path.name for path in (ROOT / "tests" / "unit").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders - BESIDE_THE_PACKAGE <= set().union(*LEVELS)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_stay_short_enough_to_read(path):
    assert len(path.read_text().splitlines()) <= MAX_LINES
