"""One module reads and writes the environment of this process."""

import os
from pathlib import Path

import pytest

import megagrpo
from megagrpo.platform.process.variables import changed, number, put

PACKAGE = Path(megagrpo.__file__).parent
NAME = "MEGAGRPO_OF_A_TEST"


@pytest.fixture(autouse=True)
def absent(monkeypatch):
    monkeypatch.delenv(NAME, raising=False)


def test_values_are_read_written_and_removed():
    assert number(NAME, 3) == 3
    put({NAME: "7"})
    assert os.environ[NAME] == "7" and number(NAME, 3) == 7
    put({NAME: None})
    assert NAME not in os.environ and number(NAME, 3) == 3


def test_changed_variables_return_to_their_values_also_after_an_error(monkeypatch):
    monkeypatch.setenv("MEGAGRPO_BEFORE", "old")
    with pytest.raises(RuntimeError), changed({NAME: "new", "MEGAGRPO_BEFORE": None}):
        assert os.environ[NAME] == "new" and "MEGAGRPO_BEFORE" not in os.environ
        raise RuntimeError
    assert os.environ["MEGAGRPO_BEFORE"] == "old" and NAME not in os.environ


def test_no_other_module_touches_the_environment():
    users = {path.name for path in PACKAGE.rglob("*.py") if "os.environ" in path.read_text()}
    assert users == {"variables.py", "forwarder.py"}  # the second runs alone, in a container
