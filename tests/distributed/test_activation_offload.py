"""Offloading activations to the host changes no number, and frees device memory."""

import gc

import pytest
import torch
from ranks import run_ranks
from tiny_policy import Case, tiny_model, tiny_run

from megagrpo.data.packing.sample_packing import pack, packing_rules
from megagrpo.platform.device.host_copies import HostCopies
from megagrpo.platform.parallel.layout import init_layout
from megagrpo.policy.megatron_policy import MegatronPolicy
from megagrpo.policy.transformer import activation_offload
from megagrpo.policy.transformer.activation_offload import OffloadedLayer, SavedTensor
from megagrpo.proof.verify.shrink import random_samples
from megagrpo.proof.verify.verified_step import fill_weights, policy_gradient

CASES = [
    (Case("alone", 1, {}), "qwen2_untied", {}),
    pytest.param(Case("half", 1, {}), "qwen3_tied", dict(offload_activations=0.5), marks=pytest.mark.full),
    pytest.param(
        Case("tp2_sp_pp2", 4, dict(tp=2, pp=2, sequence_parallel=True)), "qwen3_tied", {}, marks=pytest.mark.full
    ),
    pytest.param(Case("pp2_vpp2", 2, dict(pp=2, vpp=2)), "llama_tied", dict(recompute="full"), marks=pytest.mark.full),
    pytest.param(Case("cp2", 2, dict(cp=2)), "qwen2_untied", dict(recompute="selective"), marks=pytest.mark.full),
    pytest.param(Case("ep2", 2, dict(ep=2)), "qwen3_moe", dict(fp8_recipe="tensorwise"), marks=pytest.mark.full),
]


def _gradients(settings, hf_config) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    """Gradients of two steps in a row; the bytes offloaded, reloaded and left within layers, and the bytes on the
    device at the end."""
    activation_offload.MIN_BYTES = 1
    layout = init_layout(settings.parallel)
    policy = MegatronPolicy(settings, layout, hf_config)
    fill_weights(policy, hf_config, layout)
    count, leave = dict(left=0, back=0, stayed=0, most=0), OffloadedLayer.offload
    to_host, to_device = HostCopies.to_host, HostCopies.to_device
    weights = {p.untyped_storage().data_ptr() for chunk in policy.chunks for p in chunk.parameters()}

    def counted(copy, name):
        def copied(self, tensors):
            parts = [part for t in tensors for part in (t if isinstance(t, list) else [t])]
            count[name] += sum(part.nbytes for part in parts)
            assert not any(part.data_ptr() in weights for part in parts)
            return copy(self, tensors)

        return copied

    def leaves(self, excluded):
        saved = list(self._saved)
        leave(self, excluded)
        stayed = [
            k.tensor for k in saved if k.tensor is not None and k.tensor.untyped_storage().data_ptr() not in weights
        ]
        count["stayed"] += sum(t.nbytes for t in stayed)

    HostCopies.to_host, HostCopies.to_device, OffloadedLayer.offload = (
        counted(to_host, "left"),
        counted(to_device, "back"),
        leaves,
    )
    rules = packing_rules(settings, policy.shares_prompts)
    for seed in (1, 2):
        gc.collect()
        gc.disable()  # the test must not depend on garbage collection
        batch = pack(random_samples(seed), rules, layout.dp_rank, layout.dp_size)
        policy.logprobs(batch)
        policy.backward(batch, policy_gradient, batch.num_tokens)
    count["alive"] = sum(isinstance(thing, (SavedTensor, OffloadedLayer)) for thing in gc.get_objects())
    found = {
        f"{i}.{name}": p.main_grad.clone()
        for i, chunk in enumerate(policy.chunks)
        for name, p in chunk.named_parameters()
    }
    return found, count


@pytest.mark.parametrize(("case", "shape", "keys"), CASES, ids=str)
def test_gradients_are_the_same_bits_whether_activations_leave_or_stay(case, shape, keys):
    found = {}
    for leave in (False, True):
        share = keys.get("offload_activations", 1.0) if leave else 0.0
        settings = tiny_run(
            case.parallel, model=dict(path="tiny", precision="fp32") | keys | dict(offload_activations=share)
        )
        settings = settings.model_copy(
            update=dict(train=settings.train.model_copy(update=dict(max_tokens_per_micro_batch=64)))
        )
        found[leave] = run_ranks(_gradients, case.ranks, settings, tiny_model(shape))
    for (expected, none), (gradients, count) in zip(found[False], found[True], strict=True):
        assert none["left"] == none["back"] == 0
        assert 0 < count["back"] <= count["left"] and count["alive"] == 0
        assert count["stayed"] < 0.2 * count["left"]  # layers share them: angles, positions of sequences
        assert {name for name in gradients if not torch.equal(gradients[name], expected[name])} == set()
