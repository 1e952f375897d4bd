"""Adapters beside products in FP8: the linear rounds its operands, its adapter reads the input before it is rounded."""

from __future__ import annotations

import functools

import pytest
from ranks import run_ranks
from suites import usual
from test_fp8 import model
from tiny_policy import Case, few_samples, tiny_run

from megagrpo.data.packing.sample_packing import pack, packing_rules
from megagrpo.platform.parallel.layout import init_layout
from megagrpo.policy.fp8.fp8_settings import Fp8
from megagrpo.policy.fp8.products import CurrentScaling, Product
from megagrpo.policy.megatron_policy import MegatronPolicy
from megagrpo.proof.verify.shrink import plainly
from megagrpo.proof.verify.verified_step import (
    Outcome,
    fill_weights,
    policy_gradient,
    relative_error,
    take_step,
)
from megagrpo.proof.verify.verify_compare import compare, distances, silent_tensors

LORA = dict(rank=4)


def of_run(parallel: dict, recipe: str, train: dict | None = None, recompute: str = "none", **lora):
    fp8 = dict(fp8_recipe=recipe, recompute=recompute)
    return tiny_run(parallel, model=fp8, lora=LORA | lora, train=dict(share_prompts=False) | (train or {}))


def _linears(recipe: str) -> list[float]:
    """Relative errors of outputs, and of gradients of A and B, of linears with one projection."""
    settings, hf_config = (
        of_run({}, recipe, target_modules=["o_proj", "down_proj"]),
        model("llama_tied"),
    )
    layout = init_layout(settings.parallel)
    policy, errors = MegatronPolicy(settings, layout, hf_config), []
    fill_weights(policy, hf_config, layout)
    policy.weights_changed()
    linears = [module for chunk in policy.chunks for module in chunk.modules() if hasattr(module, "adapter")]

    def check(linear, inputs, outputs):
        x, output = inputs[0].detach().clone().requires_grad_(), outputs[0]
        (part,) = linear.adapter.values()
        a, b = (p.detach().clone().requires_grad_() for p in part.parameters())
        product = Product.apply(x, linear.weight.detach(), CurrentScaling(Fp8(recipe, hybrid=True)), None)
        expected = product + linear.adapter.scale * x @ a.t() @ b.t()
        errors.append(relative_error(output.detach(), expected.detach()))

        def add_gradients(grad):
            expected.backward(grad)
            for own, wanted in zip(part.parameters(), (a, b), strict=True):
                totals[own] = totals.get(own, 0) + wanted.grad  # of all micro-batches

        output.register_hook(add_gradients)

    totals: dict = {}
    handles = [linear.register_forward_hook(check) for linear in linears]
    batch = pack(few_samples(), packing_rules(settings, policy.shares_prompts), 0, 1)
    policy.backward(batch, policy_gradient, batch.num_tokens)
    for handle in handles:
        handle.remove()
    assert len(totals) == len(linears) * 2
    return errors + [relative_error(own.main_grad, total) for own, total in totals.items()]


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise", "mxfp8"])
def test_a_linear_adds_its_adapter_to_the_product_in_fp8(recipe):
    errors = run_ranks(_linears, 1, recipe)[0]
    assert len(errors) >= 16 and max(errors) < 1e-5


CASES = [
    (Case("pp2", 2, dict(pp=2)), "qwen2_untied"),
    (Case("tp2_sp", 2, dict(tp=2, sequence_parallel=True)), "qwen2_untied"),
    (
        Case("ep2_tp2", 2, dict(ep=2, tp=2, etp=1, sequence_parallel=True), dict(distributed_optimizer=True)),
        "qwen3_moe",
    ),
]


@functools.cache
def one_process(shape: str, recipe: str) -> Outcome:
    settings = plainly(of_run({}, recipe))
    (found,) = run_ranks(take_step, 1, settings, model(shape), few_samples())
    assert silent_tensors(found) == [] and all(".lora_" in name for name in found.gradients)
    return found


@pytest.mark.parametrize("recipe", usual(["blockwise", "mxfp8"], 0))
@pytest.mark.parametrize(("case", "shape"), usual(CASES, 0), ids=str)
def test_a_step_is_that_of_one_process_within_its_own_rounding(case, shape, recipe):
    recompute = "full" if case.name == "pp2" else "none"
    settings = of_run(case.parallel, recipe, case.train, recompute)
    found = run_ranks(take_step, case.ranks, settings, model(shape), few_samples())[0]
    alone, exact = (one_process(shape, kind) for kind in (recipe, "none"))
    assert [d for d in compare(found, exact, alone, coarse=True) if not d.passed] == []
    noise, apart = distances(alone, exact), distances(found, alone)
    rounded = sorted(noise[key] for key in noise if key[0] == "gradient")
    assert rounded[len(rounded) // 2] > 1e-2
    assert shape == "qwen3_moe" or max(apart[key] for key in apart if key[0] == "gradient") < 0.25
