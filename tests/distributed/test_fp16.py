"""A step in fp16: near float32's, its loss scaled and divided out again, and no step lost to an overflow."""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks
from suites import usual
from tiny_policy import tiny_model, tiny_run

from megagrpo.data.packing.sample_packing import pack, packing_rules
from megagrpo.platform.parallel.layout import init_layout
from megagrpo.policy.device_checks import check_device
from megagrpo.policy.find_nan import NonFiniteError
from megagrpo.policy.megatron_policy import MegatronPolicy
from megagrpo.policy.optimizer import loss_scale
from megagrpo.proof.verify.shrink import random_samples
from megagrpo.proof.verify.verified_step import fill_weights, policy_gradient


def gradients(parallel: dict, precision: str, first_scale: float) -> tuple[list[torch.Tensor], float, float, float]:
    """This rank's gradients of a step that starts at `first_scale`; the scale it ends at, the norm, and the scale that
    a restored policy has."""
    loss_scale.FIRST_SCALE = first_scale
    config, hf_config = tiny_run(parallel, model=dict(precision=precision)), tiny_model("qwen3_moe")
    layout = init_layout(config.parallel)
    policy = MegatronPolicy(config, layout, hf_config)
    fill_weights(policy, hf_config, layout)
    policy.weights_changed()
    batch = pack(random_samples(), packing_rules(config, policy.shares_prompts))
    policy.backward(batch, policy_gradient, batch.num_tokens)
    found = [p.main_grad.clone() for chunk in policy.chunks for p in chunk.parameters()]
    norm = policy.update()["grad_norm"].value
    other = loss_scale.LossScale(policy.dtype)
    other.load_state_dict(policy.loss_scale.state_dict())
    return found, policy.loss_scale.value, norm, other.value


@pytest.mark.parametrize(
    ("model", "message"),
    [("glm4", "vLLM refuses glm4 in fp16"), ("glm4_moe", "the selection biases of this model's routers")],
)
def test_models_beyond_the_range_of_fp16_are_refused(model, message):
    with pytest.raises(ValueError, match=f"^model.precision: {message}.*; set it to bf16$"):
        check_device(tiny_run(model=dict(precision="fp16")), tiny_model(model))
    check_device(tiny_run(model=dict(precision="fp16")), tiny_model("qwen3_moe"))


def exhausted() -> str:
    """What is said of gradients that overflow fp16 at the smallest scale, which the first pass halves to."""
    loss_scale.FIRST_SCALE = 2.0
    config, hf_config = tiny_run(model=dict(precision="fp16")), tiny_model("llama_tied")
    layout = init_layout(config.parallel)
    policy = MegatronPolicy(config, layout, hf_config)
    fill_weights(policy, hf_config, layout)
    policy.weights_changed()
    batch = pack(random_samples(), packing_rules(config, policy.shares_prompts))
    with pytest.raises(NonFiniteError) as error:
        policy.backward(batch, policy_gradient, 1e-9)
    return str(error.value)


def test_an_overflow_at_the_smallest_scale_is_named():
    (said,) = run_ranks(exhausted, 1)
    assert "beyond fp16's range at the smallest loss scale 1: set model.precision to bf16; the loss is" in said


@pytest.mark.parametrize("parallel", usual([{}, dict(tp=2, sequence_parallel=True), dict(pp=2)], 0), ids=str)
def test_an_overflow_is_computed_again_at_half_the_scale(parallel):
    usual_scale, too_large, exact = (
        run_ranks(gradients, 2 if parallel else 1, parallel, *case)
        for case in (("fp16", 2.0**16), ("fp16", 2.0**40), ("fp32", 2.0**16))
    )
    for (found, scale, norm, _), (again, reached, _, restored), (expected, one, true_norm, _) in zip(
        usual_scale, too_large, exact, strict=True
    ):
        assert scale == 2.0**16 < reached < 2.0**40 and restored == reached and one == 1
        assert norm == pytest.approx(true_norm, rel=2e-3)
        for ours, higher, theirs in zip(found, again, expected, strict=True):
            assert (ours - theirs).norm() <= 0.03 * theirs.norm() + 1e-7
            assert (ours - higher).norm() <= 1e-3 * theirs.norm() + 1e-7  # fewer gradients underflow at a higher scale
