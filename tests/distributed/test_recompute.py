"""The modules in `model.recompute` are computed a second time in the backward pass, and the gradient is the same."""

import pytest
import torch
from ranks import run_ranks
from te_manifest import architecture
from tiny_policy import few_samples, tiny_model, tiny_run

from megagrpo.data.packing.sample_packing import pack, packing_rules
from megagrpo.platform.parallel.layout import init_layout
from megagrpo.policy.attention.packed import TorchAttention
from megagrpo.policy.megatron_policy import MegatronPolicy
from megagrpo.proof.verify.verified_step import fill_weights, policy_gradient

PARTS = {
    "layernorm": "0.input_layernorm",
    "mla_up_proj": "linear_kv_up_proj",
    "shared_experts": "shared_experts",
    "moe": "mlp.router",
}


def _gradients(recompute, modules=("core_attn",), shape="llama_tied"):
    """Gradients of one micro-batch, and how often it computed a layer's MLP and its core attention."""
    config = tiny_run(model=dict(recompute=recompute, recompute_modules=list(modules)))
    hf_config = architecture(shape) if shape.startswith("deepseek") else tiny_model(shape)
    layout = init_layout(config.parallel)
    policy = MegatronPolicy(config, layout, hf_config)
    fill_weights(policy, hf_config, layout)
    policy.weights_changed()
    batch = pack(few_samples(), packing_rules(config, policy.shares_prompts))
    count = dict(mlp=0, attention=0)

    def counted(what):
        return lambda *_: count.__setitem__(what, count[what] + 1)

    modules = list(policy.chunks[0].named_modules())
    count |= dict.fromkeys(PARTS, 0)
    for part, ending in PARTS.items():
        for module in [module for name, module in modules if name.endswith(ending)][:1]:
            module.register_forward_hook(counted(part))
    next(module for name, module in modules if name.endswith("mlp")).register_forward_hook(counted("mlp"))
    next(module for _, module in modules if isinstance(module, TorchAttention)).register_forward_hook(
        counted("attention")
    )
    policy.backward(batch, policy_gradient, batch.num_tokens)
    passes = len(batch.micro_batches)
    found = {name: p.main_grad.clone() for name, p in policy.chunks[0].named_parameters()}
    return found, {what: n / passes for what, n in count.items() if n}


@pytest.mark.parametrize(
    ("recompute", "times"), [("selective", dict(mlp=1, attention=2)), ("full", dict(mlp=2, attention=2))]
)
def test_layers_are_computed_again_in_the_backward_pass(recompute, times):
    ((expected, once),) = run_ranks(_gradients, 1, "none")
    ((found, counted),) = run_ranks(_gradients, 1, recompute)
    assert once == dict(mlp=1, attention=1, layernorm=1) and counted == times | dict(
        layernorm=1 + (recompute == "full")
    )
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


@pytest.mark.parametrize(
    ("shape", "modules", "twice"),
    [
        ("llama_tied", ["mlp"], ["mlp"]),
        ("qwen3_moe", ["moe", "moe_act"], ["moe"]),
        ("deepseek_v3", ["mla_up_proj"], ["mla_up_proj"]),
        ("deepseek_v3", ["core_attn", "shared_experts"], ["attention", "shared_experts"]),
    ],
)
def test_the_chosen_modules_and_no_others_are_computed_again(shape, modules, twice):
    ((expected, once),) = run_ranks(_gradients, 1, "none", modules, shape)
    ((found, counted),) = run_ranks(_gradients, 1, "selective", modules, shape)
    assert {part for part in counted if counted[part] > once[part]} == set(twice)
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())
