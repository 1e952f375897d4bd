"""The three names that users' servers load do not change, wherever the code moves."""

import ast
from pathlib import Path

from megagrpo.engine.access import TokenGuard
from megagrpo.rollout import access, vllm_worker
from megagrpo.vllm_plugin.worker_verbs import WorkerVerbs

PACKAGE = Path(__file__).parents[3] / "megagrpo"


def test_the_token_guard_and_the_verbs_of_a_worker_keep_the_names_that_users_give_to_vllm():
    assert access.TokenGuard is TokenGuard and vllm_worker.WorkerVerbs is WorkerVerbs


def test_the_plug_in_keeps_the_name_that_installed_packages_tell_vllm():
    """Reads the source, because importing it requires vLLM."""
    (found,) = [node for node in ast.parse((PACKAGE / "rollout/vllm_plugin.py").read_text()).body if isinstance(node, ast.ImportFrom)]
    assert found.module == "megagrpo.vllm_plugin.engine" and [alias.name for alias in found.names] == ["register"]
    engine = ast.parse((PACKAGE / "vllm_plugin/engine.py").read_text())
    assert [node.name for node in engine.body if isinstance(node, ast.FunctionDef) and node.name == "register"] == ["register"]
