"""Transformer Engine's linears add weight gradients to `main_grad` inside their product, unrounded: `build_model` turns it on."""

import pytest
import torch
from ranks import run_ranks
from tiny_policy import tiny_model, tiny_run

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
