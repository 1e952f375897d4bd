"""The embedding adds the gradient of a micro-batch's rows to `main_grad`, and the sum equals that of a dense
gradient."""

import pytest
import torch
from ranks import run_ranks
from suites import usual
from tiny_policy import few_samples, tiny_model, tiny_run
from torch.utils._python_dispatch import TorchDispatchMode

from megagrpo.data.packing.sample_packing import pack, packing_rules
from megagrpo.platform.parallel.layout import init_layout
from megagrpo.policy.layers.embedding import TokenEmbedding
from megagrpo.policy.megatron_policy import MegatronPolicy
from megagrpo.proof.verify.verified_step import fill_weights, policy_gradient


class CountDense(TorchDispatchMode):
    """Counts dense gradients of embeddings."""

    dense = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.dense += operation.overloadpacket == torch.ops.aten.embedding_dense_backward
        return operation(*args, **kwargs or {})


def gradients_of_the_embedding(model, shape, parallel):
    """(gradient added row by row, gradient of a dense tensor, whether bfloat16 holds the first, dense gradients of
    each)."""
    config, hf_config = tiny_run(model=model, parallel=parallel), tiny_model(shape)
    layout = init_layout(config.parallel)
    policy = MegatronPolicy(config, layout, hf_config)
    fill_weights(policy, hf_config, layout)
    policy.weights_changed()
    batch = pack(few_samples(), packing_rules(config, policy.shares_prompts))
    embedding = next(module for module in policy.chunks[0].modules() if isinstance(module, TokenEmbedding))
    found, counts = [], []
    assert embedding.into_main_grad == (model["precision"] == "bf16" or layout.dp_cp_size == 1), "the policy sets it"
    for switch in (True, False):
        embedding.into_main_grad = switch
        with CountDense() as count:
            policy.backward(batch, policy_gradient, batch.num_tokens)
        found.append(embedding.weight.main_grad.clone())
        counts.append(count.dense)
    return *found, torch.equal(found[0], found[0].bfloat16().float()), counts


@pytest.mark.parametrize(
    ("ranks", "parallel"),
    usual([(1, {}), (2, dict(tp=2)), (2, dict(tp=2, sequence_parallel=True)), (2, dict(cp=2))], 2),
    ids=str,
)
@pytest.mark.parametrize("shape", usual(["llama_tied", "qwen2_untied"], 0))
def test_rows_add_up_to_the_dense_gradient(shape, ranks, parallel):
    for rows, dense, _, counts in run_ranks(gradients_of_the_embedding, ranks, dict(precision="fp32"), shape, parallel):
        torch.testing.assert_close(rows, dense, rtol=1e-5, atol=1e-8)
        assert rows.abs().max() > 0 and counts[0] == 0 and counts[1] > 0


def test_rows_of_bfloat16_weights_are_added_unrounded():
    ((rows, dense, representable, _),) = run_ranks(
        gradients_of_the_embedding, 1, dict(precision="bf16"), "qwen2_untied", {}
    )
    torch.testing.assert_close(rows, dense, rtol=2**-7, atol=2**-7 * dense.abs().max().item())
    assert not representable
