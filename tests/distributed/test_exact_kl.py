"""The exact KL over a sharded vocabulary against plain float64. `test_options_by_layouts.py` tests it in layouts."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from tiny_policy import few_samples, tiny_model, tiny_run
from torch.utils._python_dispatch import TorchDispatchMode

from megagrpo.algorithms.losses import make_loss
from megagrpo.algorithms.reductions import denominator
from megagrpo.platform.parallel.layout import init_layout
from megagrpo.policy.build import lm_head
from megagrpo.policy.lm_head.task import HeadTask
from megagrpo.policy.lm_head.vocab_logprobs import vocab_logprobs
from megagrpo.policy.step_terms import add_step_terms
from megagrpo.proof.verify.shrink import VOCABULARY, random_samples
from megagrpo.proof.verify.verified_step import prepare
from megagrpo.train_types import LossInputs, RefHead

# ----------------------------------------------------------------------------------------------------- the kernel alone


def naive(hidden, weight, labels, ref_hidden, ref_weight, direction, temperature):
    log_p = (hidden @ weight.t() / temperature).log_softmax(-1)
    log_q = (ref_hidden @ ref_weight.t() / temperature).log_softmax(-1)
    first, second = (log_p, log_q) if direction == "reverse" else (log_q, log_p)
    return log_p.gather(1, labels[:, None])[:, 0], (first.exp() * (first - second)).sum(-1)


def sharded_kl(vocab_size: int, direction: str):
    """Errors of this rank's values and gradients against plain float64 over the whole vocabulary, and the gradient of
    the padding."""
    rank, tp = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    shape = (-(-vocab_size // tp) * tp, 12)
    hidden, ref_hidden = torch.randn(2, 9, shape[1], generator=generator, dtype=torch.float64)
    weight, ref_weight = torch.randn(2, *shape, generator=generator, dtype=torch.float64)
    labels, upstream = (
        torch.randint(0, vocab_size, (9,), generator=generator),
        torch.randn(3, 9, generator=generator, dtype=torch.float64),
    )
    mine = slice(rank * shape[0] // tp, (rank + 1) * shape[0] // tp)

    leaves = hidden.clone().requires_grad_(), weight[mine].clone().requires_grad_()
    logprobs, entropy, kl = vocab_logprobs(*leaves, HeadTask(labels, ref=RefHead(ref_hidden, ref_weight[mine]), direction=direction, group=dist.group.WORLD, temperature=0.7, vocab_size=vocab_size, chunk=4, entropy_gradient=True))  # fmt: skip
    grad_hidden, grad_weight = torch.autograd.grad((logprobs, entropy, kl), leaves, tuple(upstream))
    dist.all_reduce(grad_hidden)

    whole = hidden.requires_grad_(), weight[:vocab_size].clone().requires_grad_()
    log_p = (whole[0] @ whole[1].t() / 0.7).log_softmax(-1)
    expected = naive(*whole, labels, ref_hidden, ref_weight[:vocab_size], direction, 0.7)
    expected = expected[0], -(log_p.exp() * log_p).sum(-1), expected[1]
    oracle_hidden, oracle_weight = torch.autograd.grad(expected, whole, tuple(upstream))
    own = oracle_weight[mine]
    pairs = [
        *zip((logprobs, entropy, kl), expected, strict=True),
        (grad_hidden, oracle_hidden),
        (grad_weight[: len(own)], own),
    ]
    worst = max(((found - right).abs().max() / right.abs().max()).item() for found, right in pairs if right.numel())
    return worst, grad_weight[len(own) :].abs().sum().item(), len(own)


@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize(("tp", "vocab_size"), [(2, 37), (3, 37), (3, 4)])  # in the last case a rank holds only padding
def test_value_and_gradient_over_shards_equal_plain_float64(tp, vocab_size, direction):
    results = run_ranks(sharded_kl, tp, vocab_size, direction)
    assert sum(rows for *_, rows in results) == vocab_size
    for worst, padding, _ in results:
        assert worst < 1e-12
        assert padding == 0


# -------------------------------------------------------------------------------------------------------- in the policy


def kl_of_a_step(estimator: str) -> tuple[float, float, float]:
    """(the step's metric, the mean over loss tokens, the relative error of the head's gradient). The oracle is plain
    float64 on the hidden states and heads of one process."""
    config, hf_config = tiny_run(algorithm=dict(kl_estimator=estimator, beta=5.0)), tiny_model("qwen2_untied")
    policy, batch, _ = prepare(config, hf_config, init_layout(config.parallel), few_samples())
    heads, loss_fn, kls = policy.heads(batch), make_loss(config.algorithm), []
    weight = heads[0].weight.double().requires_grad_()
    numerator = torch.zeros((), dtype=torch.float64)
    for head, micro_batch in zip(heads, batch.micro_batches, strict=True):
        (places,) = micro_batch.loss_mask.nonzero(as_tuple=True)
        ref = micro_batch.terms.ref_head
        hidden, ref_hidden, ref_weight = (t.double() for t in (head.hidden, ref.hidden, ref.weight))
        direction = estimator.removeprefix("full_")
        rows = naive(
            hidden, weight, micro_batch.labels[places], ref_hidden, ref_weight, direction, config.rollout.temperature
        )
        kls.append(rows[1].detach())
        logprobs, kl = (row.new_zeros(micro_batch.num_tokens).index_copy(0, places, row) for row in rows)
        numerator = numerator + loss_fn(LossInputs(logprobs, torch.zeros_like(logprobs), micro_batch, kl)).numerator
    (oracle,) = torch.autograd.grad(numerator / batch.num_tokens, weight)
    metrics = policy.backward(batch, loss_fn, batch.num_tokens)
    found = lm_head(policy.chunks[-1]).main_grad
    return metrics["kl"].value, torch.cat(kls).mean().item(), ((found - oracle).norm() / oracle.norm()).item()


@pytest.mark.parametrize("estimator", ["full_forward", "full_reverse"])
def test_metric_and_gradient_of_a_step_are_those_of_plain_arithmetic(estimator):
    ((metric, by_hand, error),) = run_ranks(kl_of_a_step, 1, estimator)
    assert metric == pytest.approx(by_hand, rel=1e-4)
    assert by_hand > 1e-3
    assert error < 1e-5


class CountHeadProducts(TorchDispatchMode):
    """Counts matrix products with the vocabulary as a dimension."""

    products = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            self.products += any(VOCABULARY in t.shape for t in args if isinstance(t, torch.Tensor))
        return operation(*args, **kwargs or {})


def head_products(algorithm: dict) -> float:
    """Matrix products with the LM head in a train step, per chunk of tokens."""
    config, hf_config = tiny_run(algorithm=algorithm), tiny_model("qwen2_untied")
    policy, batch, _ = prepare(config, hf_config, init_layout(config.parallel), random_samples()[:4])
    divisor = denominator(batch, config.algorithm.loss.average, config.rollout.max_completion_length)
    batch = add_step_terms(batch, policy, divisor, config.algorithm.entropy_coef)
    with CountHeadProducts() as counted:
        metrics = policy.backward(batch, make_loss(config.algorithm), divisor)
    assert "train/late_gradients" not in metrics
    return counted.products / sum(-(-int(m.loss_mask.sum()) // config.train.logprob_chunk) for m in batch.micro_batches)


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
@pytest.mark.parametrize(("estimator", "expected"), [("k3", 3), ("full_reverse", 4)])
@pytest.mark.parametrize("entropy_coef", [0.0, 0.1])
def test_the_loss_gradient_is_computed_early_so_that_logits_are_computed_once(
    loss_type, estimator, expected, entropy_coef
):
    algorithm = dict(loss_type=loss_type, kl_estimator=estimator, use_bias_correction_kl=estimator == "k3", beta=0.1)
    assert run_ranks(head_products, 1, algorithm | dict(entropy_coef=entropy_coef)) == [expected]


LOCAL = [
    dict(loss_type="sapo"),
    dict(loss_type="cispo", epsilon_high=2.0),
    dict(loss_type="dapo", importance_correction="token_mask"),
]
NOT_LOCAL = [
    dict(loss_type="vespo"),
    dict(loss_type="gmpo"),
    dict(loss_type="fipo"),
    dict(loss_type="grpo", importance_sampling_level="sequence"),
    dict(loss_type="grpo", importance_correction="sequence_truncate", importance_correction_max=1.1),
]


@pytest.mark.parametrize("algorithm", LOCAL + NOT_LOCAL, ids=lambda a: " ".join(map(str, a.values())))
def test_only_a_gradient_that_depends_on_its_token_alone_is_computed_early(algorithm):
    assert run_ranks(head_products, 1, dict(beta=0.0) | algorithm) == [3 if algorithm in LOCAL else 4]


def late_gradients(num_iterations: int) -> tuple[list[float], list[bool], int]:
    """(gradient norms, whether the metric is there) of two passes whose loss is not local although it says so, the
    second one without early gradients from the start, and the length of the schedule."""
    config = tiny_run(algorithm=dict(loss_type="dapo", num_iterations=num_iterations))
    policy, batch, _ = prepare(config, tiny_model("qwen2_untied"), init_layout(config.parallel), random_samples()[:4])
    divisor, loss = (
        denominator(batch, config.algorithm.loss.average, config.rollout.max_completion_length),
        make_loss(config.algorithm),
    )

    def not_local(inputs):
        result = loss(inputs)
        return replace(result, numerator=result.numerator * inputs.policy_logprobs.square().sum())

    norms, metrics = [], []
    for _ in range(2):
        metrics.append("train/late_gradients" in policy.backward(batch, not_local, divisor))
        norms.append(sum(p.main_grad.norm().item() for chunk in policy.chunks for p in chunk.parameters()))
    return norms, metrics, policy.scheduler.lr_decay_steps


def test_a_pass_that_is_repeated_without_early_gradients_says_so_and_the_schedule_counts_optimizer_steps():
    ((norms, metrics, length),) = run_ranks(late_gradients, 1, 3)
    assert metrics == [True, True] and norms[0] == norms[1] > 0
    assert length == 100 * 3 + 1  # of a shrunk run
