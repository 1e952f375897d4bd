"""Allowed imports. A module may import its own room and the rooms of the levels above its own in this list."""

import ast
import collections
import functools
import graphlib
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "megagrpo").rglob("*.py"))
LEVELS = [
    {"platform/process"},
    {"types", "train_types", "row_image", "config", "platform/install"},
    {"models/families", "algorithms", "data", "rewards", "platform/device"},
    {"models/precision"},
    {"platform/parallel", "sync/wire", "models/hub"},
    {"policy"},
    {"models/bridge"},
    {"records", "engine", "sync/vllm_side"},
    {"engine/servers", "sync/trainer_side", "environments"},
    {"trainer/rollout"},
    {"trainer/evaluation", "proof/plan", "proof/audit"},
    {"proof/verify"},
    {"trainer/trials", "records/report"},
    {"trainer"},
    {"platform/launch"},
    {"platform/doctor"},
    {"commands/api"},
    {"commands"},
    {"__main__"},
]
ROOMS = {name for level in LEVELS for name in level}
SHELF = {
    *("algorithms", "commands", "config", "data", "engine", "environments", "models", "platform", "policy", "proof"),
    *("records", "rewards", "sync", "trainer"),
}
MAX_LINES = 420
# Constants that several modules define: one per family of models, an oracle that imports nothing it checks, and scripts
# that import nothing of the package.
SEVERAL_HOMES = {"FAMILY", "STD_EPSILON", "PR_SET_PDEATHSIG", "TYPE_CHECKING"}
INSIDE_VLLM = "sync/vllm_side"  # nothing imports it
PREPARES = "megagrpo.platform.device"  # importing it prepares the device; megatron must be imported after it
# rooms whose `__init__` imports PREPARES first
PREPARED = {"platform/device", "platform/parallel", "policy", "models/bridge"}
IMPORTERS = {"megatron": PREPARED, "vllm": {INSIDE_VLLM}}
PARALLEL_STATE = {"platform/parallel", "platform/device"}
ONLY = {"config": {"pydantic", "pydantic_core", "yaml"}, "platform/process": set(), "platform/install": {"packaging"}}
BESIDE_THE_PACKAGE = {"benchmarks"}


def inside(path: Path) -> Path:
    """A file of the package as a path below megagrpo/."""
    return path.relative_to(ROOT / "megagrpo")


def room_of(parts: tuple[str, ...]) -> str:
    """The room of a module's path below megagrpo/: two folders where these two are a room of their own, else the first
    one."""
    second = "/".join(parts[:2])
    return second if second in ROOMS else parts[0]


def room(path: Path) -> str:
    """The room or the top-level module of a file of the package."""
    return room_of((*inside(path).parts[:-1], inside(path).stem))


def level(name: str) -> int:
    return next(i for i, rooms in enumerate(LEVELS) if name in rooms)


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def imports(path: Path) -> set[str]:
    """Every absolute dotted name that a file imports, at its top or inside a function."""
    names = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the arrows"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def own(names: set[str]) -> set[str]:
    """The rooms of this package among imported names."""
    below = {tuple(name.split(".")[1:]) for name in names if name.startswith("megagrpo.")}
    return {room_of(parts) for parts in below if parts[0] != "__version__"}


def against(path: Path) -> set[str]:
    """Rooms that a file imports against the order of levels."""
    here = room(path)
    return {there for there in own(imports(path)) - {here} if there == INSIDE_VLLM or level(there) >= level(here)}


def test_every_arrow_points_down():
    # the names of the package's __init__ are imported when they are used: tests/unit/commands/api/test_package.py
    first = ROOT / "megagrpo" / "__init__.py"
    assert own(imports(first)) == {"commands/api", "config", "models/hub"}
    files = [path for path in FILES if path != first and (path.name != "__init__.py" or room(path) in ROOMS)]
    assert len(files) > 400 and {str(inside(path)): rooms for path in files if (rooms := against(path))} == {}


def test_every_room_has_a_level_and_the_shelf_holds_thirteen_and_the_commands():
    # the shelf's own docstrings
    shelves = {path for path in FILES if path.name == "__init__.py" and room(path) not in ROOMS}
    assert {room(path) for path in FILES if path not in shelves} == ROOMS
    assert all(not imports(path) for path in shelves - {ROOT / "megagrpo" / "__init__.py"})
    folders = {path.name for path in (ROOT / "megagrpo").iterdir() if path.is_dir()}
    assert folders - {"__pycache__"} == SHELF and len(SHELF) == 14


def test_no_file_name_has_two_meanings():
    counts = collections.Counter(path.name for path in FILES if path.name != "__init__.py")
    assert {name for name, count in counts.items() if count > 1} == set()


def constants(path: Path) -> set[str]:
    """The names of a module's public constants."""
    names = set()
    for node in tree_of(path).body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)}
    return {name for name in names if name.isupper() and not name.startswith("_")}


def test_no_constant_has_two_homes():
    homes = collections.defaultdict(list)
    for path in FILES:
        for name in constants(path) - SEVERAL_HOMES:
            homes[name].append(str(inside(path)))
    assert len(homes) > 500 and {name: found for name, found in homes.items() if len(found) > 1} == {}


def test_every_assertion_has_a_message():
    found = [
        f"{inside(path)}:{node.lineno}"
        for path in FILES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Assert) and node.msg is None
    ]
    assert found == []


def run_time_imports(path: Path, modules: dict[str, Path]) -> set[str]:
    """The modules of this package that a file imports when it runs, at its top or inside a function."""
    tree = tree_of(path)
    typing_only = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in block.body
    }
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and id(node) not in typing_only:
            names |= {
                full if (full := f"{node.module}.{alias.name}") in modules else str(node.module) for alias in node.names
            }
    return names & modules.keys()


def test_no_cycle_of_modules_hides_behind_a_lazy_import():
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in FILES}
    graph = {name: run_time_imports(path, modules) - {name, "megagrpo"} for name, path in modules.items()}
    assert sum(map(len, graph.values())) > 1000
    list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError, which names the cycle


def test_megatron_and_vllm_stay_in_their_rooms():
    found = []
    for path in FILES:
        names, here = imports(path), room(path)
        packages = {name.split(".")[0] for name in names} & IMPORTERS.keys()
        found += [f"{inside(path)} imports {package}" for package in packages if here not in IMPORTERS[package]]
        if here not in PARALLEL_STATE and any("parallel_state" in name for name in names):
            found.append(f"{inside(path)} touches the parallel state")
    assert found == []


def module_level(path: Path) -> list[str]:
    """The names that a file imports outside of functions, in order; `from a import b` counts as a.b."""
    bodies, names = [tree_of(path).body], []
    for node in (node for body in bodies for node in body):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module != "__future__":
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            bodies += [
                inner for name in ("body", "orelse", "handlers", "finalbody") if (inner := getattr(node, name, None))
            ]
    return names


def test_a_package_that_imports_megatron_prepares_the_device_first():
    first = {name: module_level(ROOT / "megagrpo" / name / "__init__.py")[:1] for name in PREPARED}
    assert {name for name, names in first.items() if names != [PREPARES]} == {"platform/device"}


def test_tests_and_tools_import_megatron_inside_functions():
    scripts = [
        path for folder in ("tests", *sorted(BESIDE_THE_PACKAGE)) for path in sorted((ROOT / folder).rglob("*.py"))
    ]
    assert len(scripts) > 100
    early = {
        str(path.relative_to(ROOT))
        for path in scripts
        if any(name.split(".")[0] == "megatron" for name in module_level(path))
    }
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
        if room(path).partition("/")[0] == "trainer":
            assert not {n.split(".")[0] for n in imports(path)} & {"megatron", "vllm"}


def test_one_module_removes_files_and_folders():
    """platform/process/removal.py follows no link, does not recurse and raises nothing. Whatever else removes something
    is a text that runs in a sandbox."""
    removing = {"rmtree", "unlink", "rmdir", "removedirs", "TemporaryDirectory"}
    found = set()
    for path in FILES:
        for node in ast.walk(tree_of(path)):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if called in ("os.remove", "shutil.move") or called.rpartition(".")[2] in removing:
                found.add((str(inside(path)), called))
    assert {path for path, _ in found} == {"platform/process/removal.py"}, found


def test_unit_tests_are_in_the_folder_of_their_room():
    unit = ROOT / "tests" / "unit"
    folders = {path.parent.relative_to(unit) for path in unit.rglob("test_*.py") if path.parent != unit}
    assert {str(folder) for folder in folders if not (ROOT / "megagrpo" / folder).is_dir()} <= BESIDE_THE_PACKAGE


def test_files_stay_short_enough_to_read():
    lengths = {str(inside(path)): len(path.read_text().splitlines()) for path in FILES}
    assert {path: lines for path, lines in lengths.items() if lines > MAX_LINES} == {}
