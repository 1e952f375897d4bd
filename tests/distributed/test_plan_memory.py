"""Memory that `megagrpo plan` predicts for a rank, compared with measurements on ranks."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "plan_memory.py"


def script():
    spec = importlib.util.spec_from_file_location("plan_memory", SCRIPT)
    module = sys.modules["plan_memory"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.set_num_threads(1)  # a fork cannot use its parent's OpenMP pool
    return module


LAYOUTS = (
    "one",
    "bf16",
    "recompute",
    "tp2",
    "pp2",
    "dp2",
    "cp2",
    "tp2_pp2",
    "ep2",
    "lora",
    "llama",
    "llama_pp2_vpp2",
    "tp2_etp2",
)


@pytest.mark.full
@pytest.mark.parametrize("name", LAYOUTS)
def test_planned_memory_is_within_a_tenth_of_the_measured_peak(name):
    compared = script().compare(name)
    assert set(compared) == {"load", "logprobs", "train", "saving", "writing", "offload"}
    for phase, (measured, planned) in compared.items():
        assert planned == pytest.approx(measured, rel=0.1), phase
