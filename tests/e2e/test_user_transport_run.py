"""A whole run with a transport of the user's own takes the steps of a run with the usual one."""

import pytest

from tests.e2e import world
from tests.e2e.test_user_transport import transport  # noqa: F401


def test_a_run_names_its_transport_in_the_config(transport, tmp_path):  # noqa: F811
    run = world.train(tmp_path, f"rollout.weight_sync_transport={transport}", "run.max_steps=2")
    assert run.code == 0 and f"weight sync: {transport} (set by rollout.weight_sync_transport)" in run.out, run.err
    for key in ("weight_version", "loss"):
        expected = [line[key] for line in world.plain().metrics[:2]]
        assert [line[key] for line in run.metrics] == pytest.approx(expected, abs=1e-5)
