"""The public names of the package, and what importing it costs."""

import importlib
import inspect
import subprocess
import sys

import pytest

import megagrpo


def in_fresh_process(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_importing_the_package_imports_no_other_library():
    outside = "{name.partition('.')[0] for name in sys.modules} - set(sys.stdlib_module_names) - set(before)"
    code = f"import sys; before = [name.partition('.')[0] for name in sys.modules]; import megagrpo; print({outside})"
    assert in_fresh_process(code) == "{'megagrpo'}"


def test_no_function_needs_torch_or_pandas_before_it_is_called():
    names = ", ".join(f"megagrpo.{name}" for name in megagrpo.__all__)
    code = (
        f"import sys, megagrpo; {names}; print(sorted({{'torch', 'pandas', 'datasets', 'cloudpickle', 'megatron'}} & "
        "set(sys.modules)))"
    )
    assert in_fresh_process(code) == "[]"


def test_every_public_name_is_documented_and_comes_from_where_the_package_says():
    assert sorted(megagrpo.__all__) == sorted({*megagrpo._HOMES, "__version__"})
    for name, home in megagrpo._HOMES.items():
        public = getattr(megagrpo, name)
        assert public is getattr(importlib.import_module(home), name) and inspect.getdoc(public)
    assert set(megagrpo.__all__) <= set(dir(megagrpo)) and megagrpo.__version__


@pytest.mark.parametrize("name", ["trian", "torch"])
def test_an_unknown_name_is_an_attribute_error(name):
    with pytest.raises(AttributeError, match=f"module 'megagrpo' has no attribute '{name}'"):
        getattr(megagrpo, name)
