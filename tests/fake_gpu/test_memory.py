"""Memory that torch's allocator reports on a fake GPU, by phase, against the plan. Matrix products are skipped: they
return zeros of their size."""

import tempfile
from pathlib import Path

import pytest

from benchmarks import plan_memory
from tests.fake_gpu.runtime import needs_fake_gpu, on_gpus

pytestmark = [pytest.mark.fake_gpu, needs_fake_gpu, pytest.mark.timeout(1800)]
# 44 million parameters; micro-batches of 2048 tokens in sequences of 256.
MODEL = plan_memory.DENSE | dict(
    hidden_size=512, num_attention_heads=8, head_dim=64, intermediate_size=1536, vocab_size=16384
)
BF16 = dict(precision="bf16")
OURS = dict(run=dict(deterministic=True))  # the plan then counts our attention instead of Transformer Engine's
CASES = {
    "bf16": OURS | dict(model=BF16),
    "recompute": OURS | dict(model=BF16 | dict(recompute="full")),
    "activations on the host": OURS | dict(model=BF16 | dict(offload_activations=1.0)),
}


def measured_and_planned(sections: dict) -> dict[str, tuple[float, float]]:
    """Phase -> MiB at its peak, and in the plan."""
    from megagrpo.families.hf_config import parse_hf_config
    from tests.fake_gpu.kernels import Kernels

    Kernels.active.skips_products = True
    config = plan_memory.config_of(sections)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text("{}")
        measured = plan_memory.measured(MODEL, config, Path(folder))
    planned = plan_memory.predicted(parse_hf_config(MODEL), config, 1)
    return {phase: (measured[phase], planned[phase]) for phase in ("load", "logprobs", "train", "offload")}


@pytest.mark.parametrize("case", CASES)
def test_planned_memory_is_within_a_tenth_of_what_the_allocator_reports(case):
    found = on_gpus(measured_and_planned, 1, CASES[case], timeout=1500)[0]
    print(found)
    for phase, (measured, planned) in found.items():
        assert planned == pytest.approx(measured, rel=0.1), phase
