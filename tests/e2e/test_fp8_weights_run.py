"""A run with weights in FP8: vLLM gets them, and a resumed run equals an uninterrupted one."""

import pytest
import torch

from tests.e2e import world

pytestmark = pytest.mark.full
KEPT = ("model.precision=bf16", "model.fp8_recipe=blockwise", "train.distributed_optimizer=true", "algorithm.beta=0.1")


def test_a_run_with_weights_in_fp8_resumes_bit_for_bit_and_vllm_is_nearer_to_it_than_to_bf16_weights(tmp_path):
    straight, parts, rounded = (tmp_path / name for name in ("straight", "parts", "rounded"))
    whole = world.train(straight, *KEPT, "model.fp8_param=true", "run.max_steps=3")
    assert whole.code == 0, whole.err
    assert world.train(parts, *KEPT, "model.fp8_param=true", "run.max_steps=2").code == 0
    resumed = world.train(parts, *KEPT, "model.fp8_param=true", "run.max_steps=3", "--resume")
    assert resumed.code == 0, resumed.err
    expected, found = world.plain_tensors(whole.newest), world.plain_tensors(resumed.newest)
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    assert [row["completion"] for row in resumed.completions] == [row["completion"] for row in whole.completions]
    other = world.train(rounded, *KEPT, "run.max_steps=3")
    kept, not_kept = ([line["token_mult_prob_error"] for line in run.metrics] for run in (whole, other))
    assert 1 < max(kept) < max(not_kept)
