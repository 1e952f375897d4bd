"""The exact KL over a sharded vocabulary: against plain float64 arithmetic, and the same step in every layout."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from tiny_policy import SIZES, Case, config, full_tensors, hf_folder, old_logprobs, packing_rules, samples
from torch.utils._python_dispatch import TorchDispatchMode

from megagrpo.algorithms.losses import denominator, make_loss
from megagrpo.bridge.load import load_hf
from megagrpo.data.packing import pack
from megagrpo.parallel.layout import init_layout
from megagrpo.parallel.vocab_logprobs import vocab_logprobs_and_kl
from megagrpo.policy.hf_config import load_hf_config
from megagrpo.policy.megatron_policy import MegatronPolicy
from megagrpo.policy.reference import Reference

# ------------------------------------------------------------------------------------------------------------------ the kernel alone


def naive(hidden, weight, labels, ref_hidden, ref_weight, direction, temperature):
    log_p = (hidden @ weight.t() / temperature).log_softmax(-1)
    log_q = (ref_hidden @ ref_weight.t() / temperature).log_softmax(-1)
    first, second = (log_p, log_q) if direction == "reverse" else (log_q, log_p)
    return log_p.gather(1, labels[:, None])[:, 0], (first.exp() * (first - second)).sum(-1)


def sharded_kl(vocab_size: int, direction: str):
    """Values and gradients of this rank's shard, and plain float64 ones over the whole vocabulary: errors, and the padding's gradient."""
    rank, tp = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    shape = (-(-vocab_size // tp) * tp, 12)
    hidden, ref_hidden = torch.randn(2, 9, shape[1], generator=generator, dtype=torch.float64)
    weight, ref_weight = torch.randn(2, *shape, generator=generator, dtype=torch.float64)
    labels, upstream = torch.randint(0, vocab_size, (9,), generator=generator), torch.randn(2, 9, generator=generator, dtype=torch.float64)
    mine = slice(rank * shape[0] // tp, (rank + 1) * shape[0] // tp)

    leaves = hidden.clone().requires_grad_(), weight[mine].clone().requires_grad_()
    logprobs, _, kl = vocab_logprobs_and_kl(
        *leaves, labels, ref_hidden, ref_weight[mine], direction=direction, group=dist.group.WORLD, temperature=0.7,
        vocab_size=vocab_size, chunk=4,
    )  # fmt: skip
    grad_hidden, grad_weight = torch.autograd.grad((logprobs, kl), leaves, tuple(upstream))
    dist.all_reduce(grad_hidden)

    whole = hidden.requires_grad_(), weight[:vocab_size].clone().requires_grad_()
    expected = naive(*whole, labels, ref_hidden, ref_weight[:vocab_size], direction, 0.7)
    oracle_hidden, oracle_weight = torch.autograd.grad(expected, whole, tuple(upstream))
    own = oracle_weight[mine]
    pairs = [(logprobs, expected[0]), (kl, expected[1]), (grad_hidden, oracle_hidden), (grad_weight[: len(own)], own)]
    worst = max(((found - right).abs().max() / right.abs().max()).item() for found, right in pairs if right.numel())
    return worst, grad_weight[len(own) :].abs().sum().item(), len(own)


@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize(("tp", "vocab_size"), [(2, 37), (3, 37), (3, 4)])  # in the last one a rank holds padding only
def test_value_and_gradient_over_shards_equal_plain_float64(tp, vocab_size, direction):
    results = run_ranks(sharded_kl, tp, vocab_size, direction)
    assert sum(rows for *_, rows in results) == vocab_size
    for worst, padding, _ in results:
        assert worst < 1e-12
        assert padding == 0


# ------------------------------------------------------------------------------------------------------------------ in the policy

LAYOUTS = [
    Case("tp2", 2, dict(tp=2)),
    Case("pp2", 2, dict(pp=2)),
    Case("tp3_sequence_parallel_shared_prompts", 3, dict(tp=3, sequence_parallel=True), share_prompts=True),
    Case("tp2_cp2", 4, dict(tp=2, cp=2)),
    Case("tp2_dp2_small_micro_batches", 4, dict(tp=2), train=dict(max_tokens_per_micro_batch=40)),
    Case("logits_of_seven_tokens_at_a_time", 1, dict(), train=dict(logprob_chunk=7)),
]


def prepare(case: Case, settings, folder: str):
    """A policy that has moved away from its reference, and a batch with what the KL term needs."""
    layout = init_layout(settings.parallel)
    hf_config = load_hf_config(folder)
    policy = MegatronPolicy(settings, layout, hf_config)
    load_hf(policy.chunks, hf_config, folder, layout)
    reference = Reference(policy)
    with torch.no_grad():
        for chunk in policy.chunks:
            for parameter in chunk.parameters():
                parameter.add_(0.02 * torch.sin(40 * parameter))
    policy.weights_changed()
    batch = pack(samples(), packing_rules(case, settings), layout.dp_rank, layout.dp_size)
    return layout, hf_config, policy, reference.annotate(batch.with_logprobs(old=[old_logprobs(m) for m in batch.micro_batches]))


def one_step(case: Case, folder: str, estimator: str) -> dict:
    """Metrics and gradients of a step with an exact KL term, from a policy that has moved away from its reference."""
    settings = config(case, kl_estimator=estimator, beta=5.0)
    layout, hf_config, policy, batch = prepare(case, settings, folder)
    by_hand = mean_kl(policy.heads(batch), batch, estimator) if layout.world_size == 1 else None
    divisor = denominator(batch, settings.algorithm.loss_type, settings.rollout.max_completion_length)
    metrics = policy.train_step(batch, make_loss(settings), divisor)
    gradients = full_tensors(policy, hf_config, layout, lambda p: p.main_grad)
    layout.close()
    return {"metrics": metrics, "gradients": gradients, "by_hand": by_hand}


def mean_kl(heads, batch, estimator: str) -> float:
    """Mean over loss tokens in plain float64, from hidden states and heads of one process."""
    parts = []
    for policy, micro_batch in zip(heads, batch.micro_batches, strict=True):
        tensors = [t.double() for t in (policy.hidden, policy.weight, micro_batch.ref_head.hidden, micro_batch.ref_head.weight)]
        labels = torch.zeros(len(policy.hidden), dtype=torch.int64)
        parts.append(naive(*tensors[:2], labels, *tensors[2:], estimator.removeprefix("full_"), temperature=0.8)[1])
    return torch.cat(parts).mean().item()


def save_step(case: Case, folder: str, estimator: str, out: str) -> None:
    result = one_step(case, folder, estimator)
    if os.environ["RANK"] == "0":
        torch.save(result, out)


def run(case: Case, folder: Path, estimator: str, out: Path) -> dict:
    run_ranks(save_step, case.ranks, case, str(folder), estimator, str(out))
    return torch.load(out)


@pytest.fixture(scope="module", params=[("llama", "full_reverse"), ("qwen2", "full_forward")], ids=lambda p: "-".join(p))
def one_process(request, tmp_path_factory):
    family, estimator = request.param
    folder = hf_folder(family, tmp_path_factory.mktemp(family))
    return folder, estimator, run(Case("one process", 1, {}), folder, estimator, folder / "one_process.pt")


def test_the_metric_is_the_mean_divergence_of_the_two_models(one_process):
    _, _, found = one_process
    assert found["metrics"]["kl"] == pytest.approx(found["by_hand"], rel=1e-4)
    assert found["by_hand"] > 1e-3


@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_every_layout_takes_the_gradient_of_one_process(one_process, case, tmp_path):
    folder, estimator, expected = one_process
    found = run(case, folder, estimator, tmp_path / "found.pt")
    for name, value in expected["metrics"].items():
        assert found["metrics"][name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    assert found["gradients"].keys() == expected["gradients"].keys()
    for name, right in expected["gradients"].items():
        assert (found["gradients"][name] - right).norm() < 1e-5 * right.norm(), name


class CountHeadProducts(TorchDispatchMode):
    """Counts matrix products with the vocabulary as a dimension."""

    products = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            self.products += any(SIZES["vocab_size"] in t.shape for t in args if isinstance(t, torch.Tensor))
        return operation(*args, **kwargs or {})


def head_products(folder: str, algorithm: dict) -> float:
    """Products with the LM head in a train step, per chunk of tokens."""
    case = Case("one process", 1, dict(tp=1))
    settings = config(case, **algorithm)
    layout, _, policy, batch = prepare(case, settings, folder)
    divisor = denominator(batch, settings.algorithm.loss_type, settings.rollout.max_completion_length)
    with CountHeadProducts() as counted:
        policy.backward(batch, make_loss(settings), divisor)
    layout.close()
    return counted.products / sum(-(-int(m.loss_mask.sum()) // settings.train.logprob_chunk) for m in batch.micro_batches)


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
@pytest.mark.parametrize(("estimator", "expected"), [("k3", 3), ("full_reverse", 4)])
def test_the_gradient_of_the_loss_is_foretold_so_that_logits_are_computed_once(one_process, loss_type, estimator, expected):
    folder, *_ = one_process
    algorithm = dict(loss_type=loss_type, kl_estimator=estimator, use_bias_correction_kl=estimator == "k3")
    assert run_ranks(head_products, 1, str(folder), algorithm) == [expected]
