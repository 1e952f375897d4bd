"""Importing any module first works, and the device is prepared before megatron is imported."""

import pytest

from tests.unit.fresh_imports import ROOT, fresh_imports
from tests.unit.test_layering import FILES, INSIDE_VLLM, PREPARED, imports, named, targets

LOADED = ["megagrpo.platform.device"]  # a prepared megatron
ALL_LOADED = [
    "megagrpo.proof.verify.layouts",
    "megagrpo.trainer.wiring",
    "megagrpo.trainer.evaluation.offline",
]  # and every other library but vLLM


def module(path) -> str:
    """The dotted name of a file of the package."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def needs_vllm(path) -> bool:
    return any(named(p, {INSIDE_VLLM}) for p in (path, *targets(path)))


WITH_MEGATRON = [path for path in FILES if named(path, PREPARED)]


def check(warm: list[str], paths: list) -> None:
    """Import each file first in its own process, which has imported `warm` and no module of megagrpo."""
    errors = fresh_imports(warm, [module(path) for path in paths])
    assert len(errors) == len(paths) > 5
    failed = {name: error for name, error in errors.items() if error}
    assert not failed, "\n".join([*failed, *failed.values()])


@pytest.mark.full
def test_a_module_that_imports_megatron_can_be_imported_first():
    """One module of each such package; the next test takes all of them."""
    check(LOADED, list({path.parent: path for path in WITH_MEGATRON if "megatron" in path.read_text()}.values()))


@pytest.mark.full
def test_any_module_of_a_room_with_megatron_can_be_imported_first():
    check(LOADED, WITH_MEGATRON)


@pytest.mark.full
def test_any_other_module_can_be_imported_first():
    check(ALL_LOADED, [path for path in FILES if path not in WITH_MEGATRON and not needs_vllm(path)])


@pytest.mark.full
def test_a_module_for_vllm_can_be_imported_first():
    check(["vllm"], [path for path in FILES if needs_vllm(path)])


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_module_that_imports_megatron_can_be_imported_first_in_a_process_without_it():
    check(["torch"], [path for path in FILES if any(name.startswith("megatron") for name in imports(path))])


def test_an_unprepared_import_of_megatron_is_an_error(tmp_path):
    (tmp_path / "unprepared.py").write_text("import megatron.core\n")
    errors = fresh_imports([], ["unprepared", "megagrpo.types"], tmp_path)
    assert (
        "megatron.core is imported before megagrpo.platform.device" in errors["unprepared"]
        and errors["megagrpo.types"] == ""
    )
