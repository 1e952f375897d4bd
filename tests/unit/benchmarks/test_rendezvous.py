"""The launcher's own code brings the ranks of several nodes together, and leaves no process behind."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "rendezvous.py"
MEASURE = "import json, rendezvous; print(json.dumps(rendezvous.measure(16)._asdict()))"


@pytest.mark.full
def test_the_ranks_of_two_nodes_meet_and_end():
    done = subprocess.run(
        [sys.executable, "-c", MEASURE], cwd=BENCHMARK.parent, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    start = json.loads(done.stdout.splitlines()[-1])
    assert (start["ranks"], start["nodes"]) == (16, 2)
    # `ended` is the moment when no process holds the other end of a pipe that all have inherited
    assert 0 < start["first_rank"] <= start["begun"] <= start["joined"] <= start["first_message"] <= start["ended"]
    assert "Traceback" not in done.stderr
