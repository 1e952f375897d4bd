"""This project's tests for GPUs, and tests of ranks that use a GPU if there is one, pass on fake GPUs. Each skip has a
known reason."""

import pytest

from tests.fake_gpu.runtime import needs_fake_gpu, run_tests

pytestmark = [pytest.mark.fake_gpu, needs_fake_gpu, pytest.mark.timeout(3600)]
NO_TE = "it needs Transformer Engine, which is not installed"
HAS_GPU = "needs a machine without a GPU"
LAYOUTS, PARITY, RANKS = "tests/gpu/test_gpu_layouts.py", "tests/gpu/test_gpu_parity.py", "tests/distributed"
LAYOUT = "test_layouts_on_gpus_take_the_step_of_one_process"
# Name -> number of GPUs, pytest's arguments, number of tests that pass, words of the reasons of skips.
USUAL = {
    "tensor parallel": (2, [f"{LAYOUTS}::{LAYOUT}[tp=2,sequence_parallel-2-qwen2_untied]"], 1, ()),
    "pipeline": (2, [f"{LAYOUTS}::{LAYOUT}[pp=2,pipeline_layers=[10,14]-2-llama_tied]"], 1, ()),
    "experts": (2, [f"{LAYOUTS}::{LAYOUT}[ep=2,dp=2-2-qwen3_moe]"], 1, ()),
    "parity": (1, [PARITY, "-k", "gpu and (qwen3_tied or mixtral)"], 3, ()),
    "activations": (1, ["tests/gpu/test_gpu_activations.py", "-m", "gpu"], 2, (NO_TE,)),
    "checkpoints": (2, [f"{RANKS}/test_checkpoint.py", f"{RANKS}/test_extra_state.py"], None, ()),
    "weights by CUDA IPC": (2, [f"{RANKS}/test_cuda_sync.py"], 1, ()),
}
WHOLE = {
    "layouts of four": (4, [LAYOUTS], 31, ("needs 8 GPU(s), and there are 4",)),
    "layouts of eight": (8, [LAYOUTS, "-k", "parallel-8-"], 3, ()),
    "all families": (1, [PARITY, "-m", "gpu"], 18, ()),
    "Muon": (2, [f"{RANKS}/test_muon.py", f"{RANKS}/test_compact_moments.py"], None, (HAS_GPU,)),
}
CASES = [*((name, *case) for name, case in USUAL.items())]
CASES += [pytest.param(name, *case, marks=pytest.mark.full) for name, case in WHOLE.items()]


@pytest.mark.parametrize(("name", "gpus", "words", "passing", "reasons"), CASES)
def test_these_tests_pass(name, gpus, words, passing, reasons):
    marks = [] if "-m" in words or RANKS in words[0] else ["-m", "gpu"]
    found = run_tests([*words, *marks], gpus)
    assert not found.failed, found.output[-5000:]
    assert len(found.passed) == passing if passing else found.passed
    assert not [reason for reason in found.skipped.values() if not any(known in reason for known in reasons)]
