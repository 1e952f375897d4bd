"""Waits of tests for other threads and processes."""

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], seconds: float = 20.0, pause: float = 0.02) -> None:
    """Wait until `condition` holds, looked at every `pause` seconds. Fails after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(pause)
