"""Linears add weight gradients to `main_grad` in their backward pass. Transformer Engine's do so inside the product, unrounded:
`build_model` turns it on. Megatron's do so on a CPU for bf16 weights: the wrapper of the model turns it on."""

import pytest
import torch
from ranks import run_ranks
from tiny_policy import tiny_model, tiny_run

from megagrpo import device

SWITCH = "fuse_wgrad_accumulation"  # Transformer Engine's name of the attribute; it is False unless Megatron finds apex


def switches_of_a_model(with_switch: tuple[str, ...]) -> dict[str, bool | None]:
    """Return the switch of every linear of a built model, where the classes of these names have it, as Transformer Engine's do."""
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    from megagrpo.parallel.layout import init_layout
    from megagrpo.policy.build import build_model

    for linear in (ColumnParallelLinear, RowParallelLinear):
        if linear.__name__ in with_switch:
            setattr(linear, SWITCH, False)
    layout = init_layout(tiny_run({}).parallel)
    (chunk,) = build_model(tiny_model("qwen3_untied"), layout, dtype=torch.float32)
    layout.close()
    linears = {name: module for name, module in chunk.named_modules() if isinstance(module, ColumnParallelLinear | RowParallelLinear)}
    return {name: getattr(module, SWITCH, None) for name, module in linears.items()}


@pytest.mark.parametrize("classes", [("ColumnParallelLinear", "RowParallelLinear"), ("RowParallelLinear",)])
def test_every_linear_with_the_switch_accumulates_in_its_product_and_no_other_gets_one(classes):
    (found,) = run_ranks(switches_of_a_model, 1, classes)
    rows = {name for name in found if name.endswith(("linear_proj", "linear_fc2"))}
    assert rows and len(found) > len(rows)
    assert all(value is (True if name in rows or len(classes) == 2 else None) for name, value in found.items())


def gradients_of_a_step(parallel: dict, dtype: str, added: bool) -> tuple[dict[str, torch.Tensor], set[bool]]:
    """Return the float32 gradient of every weight, and the switches of the linears. Without `added` the wrapper's hooks add them."""
    from megagrpo.algorithms.losses import make_loss
    from megagrpo.parallel.layout import init_layout
    from megagrpo.policy.step_terms import add_step_terms
    from megagrpo.verify.shrink import random_samples
    from megagrpo.verify.step import prepare

    config = tiny_run(parallel, model=dict(precision=dtype))
    layout = init_layout(config.parallel, config.run.seed)
    policy, batch, _ = prepare(config, tiny_model("qwen3_moe"), layout, random_samples())
    linears = [module for chunk in policy.chunks for module in chunk.modules() if hasattr(module, "gradient_accumulation_fusion")]
    switches = {linear.gradient_accumulation_fusion for linear in linears}
    for linear in linears if not added else []:
        linear.gradient_accumulation_fusion = False
    policy.backward(add_step_terms(batch, policy, batch.num_tokens, config.algorithm.entropy_coef), make_loss(config), batch.num_tokens)
    found = {name: p.main_grad.clone() for chunk in policy.chunks for name, p in chunk.named_parameters()}
    layout.close()
    return found, switches


@pytest.mark.skipif(device.has_gpu(), reason="GPUs add inside Transformer Engine's products")
@pytest.mark.parametrize("parallel", [{}, dict(tp=2, sequence_parallel=True), dict(dp=2, ep=2)])
def test_on_a_cpu_linears_add_bf16_gradients_in_their_backward_pass_without_changing_them(parallel):
    ranks = parallel.get("tp", 1) * parallel.get("dp", 1)
    sizes = {name: size for name, size in parallel.items() if name != "dp"}
    added, by_hooks = (run_ranks(gradients_of_a_step, ranks, sizes, "bf16", each) for each in (True, False))
    for (gradients, switches), (expected, _) in zip(added, by_hooks, strict=True):
        assert switches == {True}
        for name, gradient in gradients.items():
            assert gradient.norm() > 0 or "router" in name or "experts" in name, name
            torch.testing.assert_close(gradient, expected[name], rtol=1e-2, atol=1e-2 * expected[name].abs().max().item(), msg=name)
    assert run_ranks(gradients_of_a_step, 1, {}, "fp32", True)[0][1] == {False}
