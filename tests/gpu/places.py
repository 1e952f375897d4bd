"""Where a GPU test runs: on a GPU, or the same code without one."""

import pytest

from megagrpo.platform import device

PLACES = [pytest.param("gpu", marks=pytest.mark.gpu), pytest.param("cpu", marks=pytest.mark.full)]


def need(place: str) -> None:
    """Skip the test where that place is missing."""
    if (place == "gpu") != device.has_gpu():
        pytest.skip("needs a GPU" if place == "gpu" else "the GPU has its own turn")


def need_gpus(count: int) -> None:
    """Skip the test where there are fewer GPUs; skip a test that needs no GPU where there are any."""
    there = len(device.visible_gpus() or [])
    if there < count or (not count and there):
        pytest.skip(f"needs {count} GPU(s), and there are {there}" if count else "the GPU has its own turn")
