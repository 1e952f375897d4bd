"""Log-probs of the tokens that top-k, top-p and min-p keep, over a sharded vocabulary, against a full sort in
float64."""

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from megagrpo.policy.lm_head.task import HeadTask
from megagrpo.policy.lm_head.vocab_logprobs import vocab_logprobs
from megagrpo.policy.lm_head.vocab_truncation import TruncationsOfTokens
from megagrpo.types import NO_TRUNCATION, Truncation
from tests.naive_truncation import truncated_log_softmax

RULES = {
    "top_k": Truncation(top_k=5),
    "top_k of one": Truncation(top_k=1),
    "top_k of more than there are": Truncation(top_k=1000),
    "top_p": Truncation(top_p=0.6),
    "little top_p": Truncation(top_p=1e-6),
    "large top_p": Truncation(top_p=0.99999),
    "min_p": Truncation(min_p=0.3),
    "min_p of one": Truncation(min_p=1.0),
    "all": Truncation(top_p=0.7, top_k=9, min_p=0.05),
}


def problem(vocab_size: int, dtype: torch.dtype, ranks: int = 1):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(11, 12, generator=generator, dtype=dtype)
    weight = 0.7 * torch.randn(-(-vocab_size // ranks) * ranks, 12, generator=generator, dtype=dtype)
    labels, upstream = (
        torch.randint(0, vocab_size, (11,), generator=generator),
        torch.randn(2, 11, generator=generator, dtype=dtype),
    )
    return hidden, weight, labels, upstream


def naive(hidden, weight, labels, rules):
    """Log-probs and entropy; the gradient flows through the kept logits."""
    logits = hidden @ weight.t() / 0.7
    log_p = truncated_log_softmax(logits.detach(), labels, rules)
    log_p = logits.double().masked_fill(log_p.isinf(), -1e30).log_softmax(-1)
    return log_p.gather(1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("early", [False, True], ids=["late gradients", "early gradients"])
@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_values_and_gradients_are_those_of_the_kept_logits(rules, early):
    hidden, weight, labels, upstream = problem(37, torch.float64)
    options = dict(temperature=0.7, truncation=rules, chunk=4, entropy_gradient=True)
    leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    early_gradients = (lambda rows, *outputs: tuple(upstream[:, rows])) if early else None
    found = vocab_logprobs(*leaves, HeadTask(labels, upstream=early_gradients, **options))
    grads = torch.autograd.grad(found, leaves, tuple(upstream))
    expected = naive(*leaves, labels, rules)
    oracles = torch.autograd.grad(expected, leaves, tuple(upstream))
    for value, right in zip((*found, *grads), (*expected, *oracles), strict=True):
        torch.testing.assert_close(value, right, rtol=1e-10, atol=1e-10)
    assert (found[0] > -1e6).all()  # sampled tokens are kept, even where the rules drop them
    if rules.top_k != 1000:
        assert (found[0] - vocab_logprobs(hidden, weight, HeadTask(labels, temperature=0.7))[0]).abs().max() > 1e-9


def test_logits_that_equal_the_last_one_kept_are_kept():
    weight = torch.tensor([[2.0], [1.0], [1.0], [1.0], [0.0]])
    for rules in (Truncation(top_k=2), Truncation(top_p=0.5), Truncation(min_p=0.3)):
        logprobs, _ = vocab_logprobs(torch.ones(4, 1), weight, HeadTask(torch.arange(4), truncation=rules))
        torch.testing.assert_close(logprobs, weight[:4, 0].log_softmax(0))


MIXED = [*(RULES[name] for name in ("top_k", "top_p", "min_p", "all", "top_k of one")), NO_TRUNCATION]
OWNERS = torch.tensor([0, 0, 5, 1, 2, 2, 3, 4, 5, 1, 3])  # the rules of each token


def test_tokens_with_rules_of_their_own_have_the_values_of_a_pass_with_these_rules_for_all():
    hidden, weight, labels, _ = problem(37, torch.float32)
    options = dict(temperature=0.7, chunk=4)
    mixed = TruncationsOfTokens.of(MIXED, OWNERS)
    found = torch.stack(vocab_logprobs(hidden, weight, HeadTask(labels, truncation=mixed, **options)))
    for number, rules in enumerate(MIXED):
        alone = torch.stack(vocab_logprobs(hidden, weight, HeadTask(labels, truncation=rules, **options)))
        assert torch.equal(found[:, OWNERS == number], alone[:, OWNERS == number])


def sharded_mixed() -> float:
    """The largest error of this rank's gradients and values with rules by token."""
    rank, tp = dist.get_rank(), dist.get_world_size()
    hidden, weight, labels, upstream = problem(37, torch.float64, tp)
    height = weight.shape[0] // tp
    mine = slice(rank * height, (rank + 1) * height)
    leaves = hidden.clone().requires_grad_(), weight[mine].clone().requires_grad_()
    mixed = TruncationsOfTokens.of(MIXED, OWNERS)
    options = dict(temperature=0.7, vocab_size=37, truncation=mixed, chunk=4, group=dist.group.WORLD)
    logprobs, _ = vocab_logprobs(*leaves, HeadTask(labels, **options))
    (grad_weight,) = torch.autograd.grad(logprobs, leaves[1:], upstream[0])
    whole = hidden, weight[:37].clone().requires_grad_()
    expected = torch.zeros_like(logprobs)
    for number, rules in enumerate(MIXED):
        expected = torch.where(OWNERS == number, naive(*whole, labels, rules)[0], expected)
    (oracle,) = torch.autograd.grad(expected, whole[1:], upstream[0])
    own = oracle[mine]
    return max((logprobs - expected).abs().max().item(), (grad_weight[: len(own)] - own).abs().max().item())


def test_rules_by_token_are_the_same_over_shards():
    assert max(run_ranks(sharded_mixed, 2)) < 1e-10


def sharded(vocab_size: int, name: str) -> tuple[float, float]:
    """Errors of values and gradients of this rank's shard."""
    rank, tp, rules = dist.get_rank(), dist.get_world_size(), RULES[name]
    hidden, weight, labels, upstream = problem(vocab_size, torch.float64, tp)
    height = weight.shape[0] // tp
    mine = slice(rank * height, (rank + 1) * height)
    leaves = hidden.clone().requires_grad_(), weight[mine].clone().requires_grad_()
    options = dict(temperature=0.7, vocab_size=vocab_size, truncation=rules, chunk=4)
    logprobs, entropy = vocab_logprobs(*leaves, HeadTask(labels, group=dist.group.WORLD, **options))
    grad_hidden, grad_weight = torch.autograd.grad(logprobs, leaves, upstream[0])
    dist.all_reduce(grad_hidden)
    whole = hidden.requires_grad_(), weight[:vocab_size].clone().requires_grad_()
    expected = naive(*whole, labels, rules)
    oracle_hidden, oracle_weight = torch.autograd.grad(expected[0], whole, upstream[0])
    own = oracle_weight[mine]
    pairs = [
        (logprobs, expected[0]),
        (entropy, expected[1]),
        (grad_hidden, oracle_hidden),
        (grad_weight[: len(own)], own),
    ]
    return max((one - other).abs().max().item() for one, other in pairs if other.numel()), grad_weight[
        len(own) :
    ].abs().sum().item()


@pytest.mark.parametrize("name", ["top_k", "top_p", "min_p", "all", "top_k of more than there are"])
@pytest.mark.parametrize(("tp", "vocab_size"), [(2, 37), (3, 4)])  # in the last case a rank holds only padding
def test_over_shards_they_are_the_same(tp, vocab_size, name):
    for error, padding in run_ranks(sharded, tp, vocab_size, name):
        assert error < 1e-10 and padding == 0
