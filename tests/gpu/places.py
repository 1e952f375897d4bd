"""Where a test of a GPU runs: on one, and the same code without."""

import pytest

from megagrpo import device

PLACES = [pytest.param("gpu", marks=pytest.mark.gpu), pytest.param("cpu", marks=pytest.mark.full)]


def need(place: str) -> None:
    """Skips the test where that place is not."""
    if (place == "gpu") != device.has_gpu():
        pytest.skip("needs a GPU" if place == "gpu" else "the GPU has its own turn")


def need_gpus(count: int) -> None:
    """Skips the test where there are fewer GPUs, and one that needs none where there are any."""
    there = len(device.visible_gpus() or [])
    if there < count or (not count and there):
        pytest.skip(f"needs {count} GPU(s), and there are {there}" if count else "the GPU has its own turn")
