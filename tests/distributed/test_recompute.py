"""The modules in `model.recompute` are computed a second time in the backward pass, and the gradient is the same."""

import pytest
import torch
from ranks import run_ranks
from tiny_policy import tiny_model, tiny_run

from megagrpo.data.packing import pack, packing_rules
from megagrpo.parallel.layout import init_layout
from megagrpo.policy.attention.packed import TorchAttention
from megagrpo.policy.megatron_policy import MegatronPolicy
from megagrpo.verify.shrink import random_samples
from megagrpo.verify.step import fill_weights, policy_gradient


def _gradients(recompute):
    """Gradients of one micro-batch, and how often it computed a layer's MLP and its core attention."""
    config, hf_config = tiny_run(model=dict(recompute=recompute)), tiny_model("llama_tied")
    layout = init_layout(config.parallel)
    policy = MegatronPolicy(config, layout, hf_config)
    fill_weights(policy, hf_config, layout)
    policy.weights_changed()
    batch = pack(random_samples(), packing_rules(config, policy.shares_prompts))
    count = dict(mlp=0, attention=0)

    def counted(what):
        return lambda *_: count.__setitem__(what, count[what] + 1)

    modules = list(policy.chunks[0].named_modules())
    next(module for name, module in modules if name.endswith("mlp")).register_forward_hook(counted("mlp"))
    next(module for _, module in modules if isinstance(module, TorchAttention)).register_forward_hook(counted("attention"))
    policy.backward(batch, policy_gradient, batch.num_tokens)
    passes = len(batch.micro_batches)
    found = {name: p.main_grad.clone() for name, p in policy.chunks[0].named_parameters()}
    return found, {what: n / passes for what, n in count.items()}


@pytest.mark.parametrize(("recompute", "times"), [("selective", dict(mlp=1, attention=2)), ("full", dict(mlp=2, attention=2))])
def test_layers_are_computed_again_in_the_backward_pass(recompute, times):
    ((expected, once),) = run_ranks(_gradients, 1, "none")
    ((found, counted),) = run_ranks(_gradients, 1, recompute)
    assert once == dict(mlp=1, attention=1) and counted == times
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())
