"""A sample of the random kills (random_kills.py): whatever is killed, the run ends bit-identical and leaves nothing
behind."""

import pytest

from tests.e2e.random_kills import SETTINGS, many_kills


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("setting", SETTINGS)
def test_runs_that_are_killed_at_random_end_like_undisturbed_ones_and_leave_nothing(setting, tmp_path):
    assert many_kills(7, 5, tmp_path / "struck", tmp_path / "undisturbed", [setting]) == []
