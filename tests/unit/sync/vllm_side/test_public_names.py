"""The names of this package that users' servers load: those that the docs and the installed package give to vLLM
exist."""

import ast
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[4]


def defines(module: str, name: str) -> bool:
    """Whether a module's source defines `name`. Reads the source, because importing it may require vLLM."""
    body = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text()).body
    return any(isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name for node in body)


def test_the_plug_in_of_the_installed_package_exists():
    entry_points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][
        "vllm.general_plugins"
    ]
    module, _, function = entry_points["megagrpo"].partition(":")
    assert defines(module, function)


def test_every_class_that_the_docs_give_to_vllm_exists():
    options = re.compile(r"--(?:middleware|worker-extension-cls)[ =]+(megagrpo[\w.]+)\.(\w+)")
    named = {found for page in (ROOT / "docs").glob("*.md") for found in options.findall(page.read_text())}
    assert {name for _, name in named} == {"TokenGuard", "WorkerVerbs"}
    assert all(defines(*found) for found in named)
