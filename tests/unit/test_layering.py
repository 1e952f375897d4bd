"""The package is a stair: a room imports only the rooms below it, and a part of a room only the parts below it, in lazy
imports and annotations too."""

import ast
import collections
import functools
import graphlib
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "megagrpo").rglob("*.py"))
FLOORS = (  # from the ground up: a room imports rooms below it only
    *(
        "suggestions",
        "loopback",
        "types",
        "train_types",
        "regular_files",
        "row_image",
        "config",
        "platform",
        "families",
        "algorithms",
    ),
    *("data", "rewards", "policy", "weights", "records", "engine", "sync", "environments", "planner", "trainer"),
    *("proof", "cluster", "commands", "__main__"),
)
ROOMS = {name for name in FLOORS if (ROOT / "megagrpo" / name).is_dir()}
# Below the first level the same holds. The files beside the folders of a room are a part of their own, "".
PARTS = {
    "config": ("basics", "sections", "rules", ""),
    "platform": ("process", "install", "device", "rendezvous", "parallel"),
    "families": ("shared", "parts", "own", ""),
    "data": ("images", "sources", "tokens", "", "packing"),
    "rewards": ("registry", "math", "sandbox", "functions", "workers", ""),
    "policy": (
        *("layers", "fp8", "lm_head", "attention", "blocks", "moe", "lora", "optimizer", "transformer", "images", ""),
    ),
    "weights": ("slices", "precision", "files", "blocks", "bridge", "hub"),
    "records": ("checkpoints", "rows", "sinks", ""),
    "engine": ("http", "", "servers"),
    "sync": ("wire", "trainer_side", "vllm_side"),
    "environments": ("episodes", "adapters", "programs", "agents", ""),
    "planner": ("costs", "rules", "times", ""),
    "trainer": ("gpu", "rollout", "evaluation", "saving", "data_checks", "", "methods"),
    "proof": ("audit", "verify", "report"),
    "cluster": ("launch", "doctor"),
    "commands": ("api", "arguments", "", "checkpoints", "setup", "runs"),
}
# Rules and sections name the class of the whole config in annotations, which hold their rules.
ANNOTATED = {("config", "RunConfig")}
MAX_FILES, MAX_FOLDER_LINES = 15, 3000  # of a folder, without its `__init__` and its folders
MAX_LINES = 420
# Constants that several modules define: one per family of models, an oracle that imports nothing it checks, and scripts
# that import nothing of the package.
SEVERAL_HOMES = {"FAMILY", "STD_EPSILON", "PR_SET_PDEATHSIG", "TYPE_CHECKING"}
MAX_FUNCTION_LINES, MAX_BRANCHES = 60, 25
MAX_CONFIG_TAKERS = 220  # a goal is 150
A_KERNEL = "head_statistics"  # compiled by Triton as one function
INSIDE_VLLM = "sync/vllm_side"  # nothing imports it
PREPARES = "megagrpo.platform.device"  # importing it prepares the device; megatron must be imported after it
# parts whose `__init__` imports PREPARES first, or whose room's does
PREPARED = {"platform/device", "platform/parallel", "policy", "weights/bridge", "weights/files", "weights/blocks"}
IMPORTERS = {"megatron": PREPARED, "vllm": {INSIDE_VLLM}}
PARALLEL_STATE = {"platform/parallel", "platform/device"}
ONLY = {
    "config": {"pydantic", "pydantic_core", "yaml"},
    "platform/process": set(),
    "platform/install": {"packaging"},
    "suggestions": set(),
    "loopback": set(),
    "regular_files": set(),
}
SLOW = {"transformers", "vllm", "peft", "openai", "wandb", "reasoning_gym", "smolagents"}  # to import
BESIDE_THE_PACKAGE = {"benchmarks"}


def inside(path: Path) -> Path:
    """A file of the package as a path below megagrpo/."""
    return path.relative_to(ROOT / "megagrpo")


@functools.cache
def place(path: Path) -> tuple[str, str]:
    """The room of a file of the package, and its part of the room."""
    room, *below = inside(path).parts
    return (room, below[0] if len(below) > 1 else "") if below else (path.stem, "")


def named(path: Path, names: set[str]) -> bool:
    """Whether the file is in one of these rooms or in one of these parts, "room/part"."""
    room, part = place(path)
    return room in names or f"{room}/{part}" in names


MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in FILES}


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    """All nodes of a file."""
    return [*ast.walk(tree_of(path))]


@functools.cache
def imports(path: Path) -> set[str]:
    """Every absolute dotted name that a file imports: at its top, inside a function or for annotations."""
    names = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the arrows"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@functools.cache
def targets(path: Path) -> set[Path]:
    """The files of the package that a file imports."""
    found = set()
    for name in imports(path):
        module = next((m for m in (name, name.rpartition(".")[0]) if m in MODULES and m != "megagrpo"), None)
        if module and (place(path)[0], name.rpartition(".")[2]) not in ANNOTATED:
            found.add(MODULES[module])
    return found


def test_every_room_imports_rooms_below_it_only():
    assert {place(path)[0] for path in FILES} - {"__init__"} == set(FLOORS) and len(ROOMS) <= 17
    up = [
        f"{inside(path)} imports {inside(target)}"
        for path in FILES
        if place(path)[0] != "__init__"
        for target in targets(path)
        if FLOORS.index(place(target)[0]) > FLOORS.index(place(path)[0])
    ]
    assert up == []


def test_the_package_itself_names_its_api_only():
    """Its names are imported when they are used: tests/unit/commands/api/test_package.py."""
    assert {place(target)[0] for target in targets(ROOT / "megagrpo" / "__init__.py")} == {
        "commands",
        "config",
        "weights",
    }


def test_every_part_of_a_room_imports_parts_below_it_only():
    folders = {room: {place(path)[1] for path in FILES if place(path)[0] == room} for room in ROOMS}
    assert {room: parts - {""} for room, parts in folders.items() if parts - {""} - set(PARTS.get(room, ()))} == {}
    up = [
        f"{inside(path)} imports {inside(target)}"
        for path in FILES
        for target in targets(path)
        if place(target)[0] == place(path)[0] in PARTS
        for order in [PARTS[place(path)[0]]]
        if place(target)[1] != place(path)[1] and order.index(place(target)[1]) > order.index(place(path)[1])
    ]
    assert up == []


def test_nothing_imports_what_runs_inside_vllm():
    assert [
        str(inside(p))
        for p in FILES
        if not named(p, {INSIDE_VLLM}) and any(named(t, {INSIDE_VLLM}) for t in targets(p))
    ] == []


def test_a_folder_can_be_read_at_once():
    large = {}
    for folder in {path.parent for path in FILES}:
        own = [path for path in FILES if path.parent == folder and path.name != "__init__.py"]
        lines = sum(len(path.read_text().splitlines()) for path in own)
        if len(own) > MAX_FILES or lines > MAX_FOLDER_LINES:
            large[str(inside(folder))] = (len(own), lines)
    assert large == {}


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


def test_prose_names_files_that_exist():
    """In docstrings, comments and messages of the package: `records/rows/dump.py`, or `dump.py` beside it."""
    everywhere = {
        path.name for folder in ("megagrpo", "tests", "docs", "benchmarks") for path in (ROOT / folder).rglob("*.py")
    }
    invented = {"COMMAND.py", "NAME.py", "core_algos.py"}  # of a reader, and of another project
    found = {
        (str(inside(path)), name)
        for path in FILES
        for name in re.findall(r"`(?:[\w/]+/)?(\w+\.py)`", path.read_text())
        if name not in everywhere | invented
    }
    assert found == set()


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
        for node in nodes_of(path)
        if isinstance(node, ast.Assert) and node.msg is None
    ]
    assert found == []


@functools.cache
def run_time_imports(path: Path) -> set[str]:
    """The modules of this package that a file imports when it runs, at its top or inside a function."""
    typing_only = {
        id(node)
        for block in nodes_of(path)
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in block.body
    }
    names = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and id(node) not in typing_only:
            names |= {
                full if (full := f"{node.module}.{alias.name}") in MODULES else str(node.module) for alias in node.names
            }
    return names & MODULES.keys()


def test_no_cycle_of_modules_hides_behind_a_lazy_import():
    graph = {name: run_time_imports(path) - {name, "megagrpo"} for name, path in MODULES.items()}
    assert sum(map(len, graph.values())) > 1000
    list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError, which names the cycle


def test_no_module_imports_a_family():
    """What families share is in `parts/` and `shared/`; `family_index.py` finds the families."""
    folder = ROOT / "megagrpo" / "families"
    text = re.compile(r"^\w+ = (?:Family|replace)\(", re.MULTILINE)
    families = {name for name, path in MODULES.items() if folder in path.parents and text.search(path.read_text())}
    found = {name for name, path in MODULES.items() if families & (run_time_imports(path) - {name, "megagrpo"})}
    assert len(families) > 15 and found == {"megagrpo.families.family_index"}


def test_megatron_and_vllm_stay_in_their_rooms():
    wrong = []
    for path in FILES:
        names = imports(path)
        for package, rooms in IMPORTERS.items():
            if any(name.split(".")[0] == package for name in names) and not named(path, rooms):
                wrong.append(f"{inside(path)} imports {package}")
        if any("parallel_state" in name for name in names) and not named(path, PARALLEL_STATE):
            wrong.append(f"{inside(path)} touches the parallel state")
    assert wrong == []


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


@pytest.mark.parametrize("name", sorted(PREPARED - {"platform/device"}))
def test_a_package_that_imports_megatron_prepares_the_device_first(name):
    assert module_level(ROOT / "megagrpo" / name / "__init__.py")[:1] == [PREPARES]


def test_tests_and_tools_import_slow_packages_inside_functions():
    """Collecting tests must stay fast: each process of pytest-xdist collects all of them."""
    scripts = [
        path for folder in ("tests", *sorted(BESIDE_THE_PACKAGE)) for path in sorted((ROOT / folder).rglob("*.py"))
    ]
    assert len(scripts) > 100
    somewhere = re.compile(rf"^\s*(?:from|import) (?:{'|'.join([*SLOW, 'megatron'])})\b", re.MULTILINE)
    early = {
        (str(path.relative_to(ROOT)), package)
        for path in scripts
        if somewhere.search(path.read_text())
        for package in {name.split(".")[0] for name in module_level(path)}
        if package == "megatron"
        or (package == "vllm" and path.name.startswith("test_"))
        or (package in SLOW and ROOT / "tests" / "unit" in path.parents)
    }
    assert early == set()


@pytest.mark.parametrize("name", ONLY)
def test_the_config_needs_pydantic_and_yaml_only_and_processes_need_nothing(name):
    files = [path for path in FILES if named(path, {name})]
    outside = {n.split(".")[0] for path in files for n in imports(path)} - set(sys.stdlib_module_names) - {"megagrpo"}
    assert files and outside <= ONLY[name]


def test_nothing_in_the_package_imports_its_tools_or_tests():
    for path in FILES:
        assert not {n.split(".")[0] for n in imports(path)} & {"launch", "tests", "benchmarks"}


def test_the_algorithm_loop_speaks_of_neither_megatron_nor_vllm():
    for path in FILES:
        if place(path)[0] == "trainer":
            assert not {n.split(".")[0] for n in imports(path)} & {"megatron", "vllm"}


def test_one_module_removes_files_and_folders():
    """platform/process/cleanup/removal.py follows no link, does not recurse and raises nothing. Whatever else removes something
    is a text that runs in a sandbox."""
    removing = {"rmtree", "unlink", "rmdir", "removedirs", "TemporaryDirectory"}
    found = set()
    for path in FILES:
        for node in nodes_of(path):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if called in ("os.remove", "shutil.move") or called.rpartition(".")[2] in removing:
                found.add((str(inside(path)), called))
    assert {path for path, _ in found} == {"platform/process/cleanup/removal.py"}, found


def test_unit_tests_are_in_the_folder_of_their_room():
    unit = ROOT / "tests" / "unit"
    folders = {path.parent.relative_to(unit) for path in unit.rglob("test_*.py") if path.parent != unit}
    assert {str(folder) for folder in folders if not (ROOT / "megagrpo" / folder).is_dir()} <= BESIDE_THE_PACKAGE


def test_files_stay_short_enough_to_read():
    lengths = {str(inside(path)): len(path.read_text().splitlines()) for path in FILES}
    assert {path: length for path, length in lengths.items() if length > MAX_LINES} == {}


def branches(function: ast.AST) -> int:
    """The paths through a function: 1, and 1 for each branch, loop, handler, further operand and part of a
    comprehension, those of functions inside it too."""
    forks = (ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.match_case)
    count = 1
    for node in ast.walk(function):
        if isinstance(node, ast.BoolOp):
            count += len(node.values) - 1
        elif isinstance(node, ast.comprehension):
            count += 1 + len(node.ifs)
        else:
            count += isinstance(node, forks)
    return count


def test_branches_counts_every_fork():
    text = """
def f(x):
    if x and x.y or z:
        for a in [b for b in x if b if b.c]:
            pass
    match x:
        case 1:
            return 1 if x else 2
    while x:
        try:
            pass
        except ValueError:
            def g():
                if x:
                    pass
"""
    assert branches(ast.parse(text)) == 1 + 3 + 1 + 3 + 1 + 1 + 1 + 1 + 1


def test_functions_stay_short_enough_to_read():
    functions = [
        (f"{inside(path)}:{node.name}", node.end_lineno - node.lineno + 1, branches(node))
        for path in FILES
        for node in nodes_of(path)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name != A_KERNEL
    ]
    assert len(functions) > 3000
    assert {name: lines for name, lines, _ in functions if lines > MAX_FUNCTION_LINES} == {}
    assert {name: count for name, _, count in functions if count > MAX_BRANCHES} == {}


def names_in(annotation: ast.expr | None) -> set[str]:
    return {node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)} if annotation else set()


def config_takers(path: Path, sections: set[str]) -> list[str]:
    """The functions of a file that have a parameter that is the config or one of its sections, and such fields of its
    classes."""
    takers = []
    for node in nodes_of(path):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            parameters = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            takers += [node.name] if any(names_in(each.annotation) & sections for each in parameters) else []
        elif isinstance(node, ast.ClassDef):
            fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
            takers += [
                f"{node.name}.{ast.unparse(each.target)}" for each in fields if names_in(each.annotation) & sections
            ]
    return takers


def test_what_a_rank_runs_takes_values_rather_than_the_config():
    """In all files that `trainer/rank.py` imports, directly or not. A function that takes a value can be read, called and
    tested without a config."""
    files, pending = set[Path](), [ROOT / "megagrpo" / "trainer" / "rank.py"]
    while pending:
        if (path := pending.pop()) not in files:
            files.add(path)
            pending += targets(path)
    config = {path for path in FILES if place(path)[0] == "config"}
    classes = {node.name for path in config for node in nodes_of(path) if isinstance(node, ast.ClassDef)}
    sections = {name for name in classes if name == "RunConfig" or name.endswith("Section")}
    takers = {str(inside(path)): config_takers(path, sections) for path in files - config}
    assert len(files) > 300 and len(sections) > 10
    assert 0 < sum(map(len, takers.values())) <= MAX_CONFIG_TAKERS, takers
