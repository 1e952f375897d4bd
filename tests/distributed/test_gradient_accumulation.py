"""How weight gradients reach their float32 sums `main_grad`.

Transformer Engine's linears add them inside their product, unrounded: `build_model` turns it on. On a CPU large
gradients are added by blocks, with the bits of Megatron's sum.
"""

import pytest
import torch
from ranks import run_ranks
from tiny_policy import tiny_model, tiny_run

from megagrpo.data.packing.sample_packing import pack, packing_rules
from megagrpo.platform import device
from megagrpo.platform.parallel.layout import init_layout
from megagrpo.policy.megatron_policy import MegatronPolicy
from megagrpo.policy.optimizer import policy_optimizer as optimizer
from megagrpo.proof.verify.shrink import random_samples
from megagrpo.proof.verify.verified_step import fill_weights, policy_gradient

SWITCH = "fuse_wgrad_accumulation"  # Transformer Engine's name of the attribute; it is False unless Megatron finds apex


def switches_of_a_model(with_switch: tuple[str, ...]) -> dict[str, bool | None]:
    """Return the switch of every linear of a built model, where the classes of these names have it, as Transformer
    Engine's do."""
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    from megagrpo.policy.build import build_model
    from megagrpo.policy.transformer.transformer_config import ModelOptions

    for linear in (ColumnParallelLinear, RowParallelLinear):
        if linear.__name__ in with_switch:
            setattr(linear, SWITCH, False)
    layout = init_layout(tiny_run({}).parallel)
    (chunk,) = build_model(tiny_model("qwen3_untied"), layout, ModelOptions(dtype=torch.float32))
    layout.close()
    linears = {
        name: module
        for name, module in chunk.named_modules()
        if isinstance(module, ColumnParallelLinear | RowParallelLinear)
    }
    return {name: getattr(module, SWITCH, None) for name, module in linears.items()}


@pytest.mark.parametrize("classes", [("ColumnParallelLinear", "RowParallelLinear"), ("RowParallelLinear",)])
def test_every_linear_with_the_switch_accumulates_in_its_product_and_no_other_gets_one(classes):
    (found,) = run_ranks(switches_of_a_model, 1, classes)
    rows = {name for name in found if name.endswith(("linear_proj", "linear_fc2"))}
    assert rows and len(found) > len(rows)
    assert all(value is (True if name in rows or len(classes) == 2 else None) for name, value in found.items())


def sums(kept_bytes: int) -> tuple[list[torch.Tensor], int]:
    """The gradient sums of two micro-batches of a bfloat16 model, and the number of weights with a hook for blocks."""
    config, hf_config = tiny_run(model=dict(precision="bf16")), tiny_model("qwen2_untied")
    layout = init_layout(config.parallel)
    optimizer.KEPT_BYTES = kept_bytes
    policy = MegatronPolicy(config, layout, hf_config)
    fill_weights(policy, hf_config, layout)
    policy.weights_changed()
    batch = pack(random_samples(), packing_rules(config, policy.shares_prompts))
    assert len(batch.micro_batches) > 1
    policy.backward(batch, policy_gradient, batch.num_tokens)
    parameters = list(policy.chunks[0].parameters())
    return [p.main_grad.clone() for p in parameters], sum(bool(p._post_accumulate_grad_hooks) for p in parameters)


@pytest.mark.skipif(device.has_gpu(), reason="a GPU adds gradients in one kernel")
def test_gradients_that_are_added_by_blocks_have_the_bits_of_megatrons_sum():
    ((blocks, hooks), (whole, none)) = (run_ranks(sums, 1, kept)[0] for kept in (0, 2**40))
    assert hooks == len(blocks) and none == 0
    assert all(map(torch.equal, blocks, whole)) and all(gradient.any() for gradient in blocks)
