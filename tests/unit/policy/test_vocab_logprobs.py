import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megagrpo.policy.lm_head.task import HeadTask
from megagrpo.policy.lm_head.vocab_logprobs import vocab_logprobs
from megagrpo.types import Truncation
from tests.naive_truncation import truncated_log_softmax
from tests.unit.for_each import for_each


def naive(hidden, weight, labels, temperature, vocab_size, cap=None):
    logits = (hidden @ weight.t())[:, :vocab_size].double()
    logits = (logits if cap is None else cap * torch.tanh(logits / cap)) / temperature
    logprobs = logits.log_softmax(-1)
    return logprobs.gather(1, labels[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


def problem(num_tokens=11, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_tokens, 16, generator=generator, requires_grad=True)
    weight = torch.randn(40, 16, generator=generator, requires_grad=True)
    labels = torch.randint(0, 37, (num_tokens,), generator=generator)
    return hidden, weight, labels, torch.randn(num_tokens, generator=generator)


@for_each("chunk", [3, 11, 64])
@for_each("temperature", [1.0, 0.7])
@for_each("vocab_size", [37, 40])
def test_logprobs_entropy_and_gradients_equal_plain_log_softmax(chunk, temperature, vocab_size):
    hidden, weight, labels, upstream = problem()
    logprobs, entropy = vocab_logprobs(
        hidden, weight, HeadTask(labels, temperature=temperature, vocab_size=vocab_size, chunk=chunk)
    )
    grads = torch.autograd.grad(logprobs, (hidden, weight), upstream)
    expected, expected_entropy = naive(hidden, weight, labels, temperature, vocab_size)
    expected_grads = torch.autograd.grad(expected, (hidden, weight), upstream.double())
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), expected_entropy, rtol=1e-5, atol=1e-5)
    for grad, oracle in zip(grads, expected_grads, strict=True):
        assert oracle.norm() > 0
        torch.testing.assert_close(grad, oracle, rtol=1e-4, atol=1e-5)


def test_padding_rows_of_the_vocabulary_have_no_probability_and_no_gradient():
    hidden, weight, labels, upstream = problem()
    with torch.no_grad():
        weight[37:] = 100 * hidden.sum(0)  # wins the softmax if padding counts
    logprobs, _ = vocab_logprobs(hidden, weight, HeadTask(labels, vocab_size=37))
    (grad,) = torch.autograd.grad(logprobs, weight, upstream)
    assert grad[37:].abs().max() == 0
    torch.testing.assert_close(logprobs.double(), naive(hidden, weight, labels, 1.0, 37)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunk", [3, 64])
def test_bfloat16_heads_give_float32_logprobs_close_to_the_float32_ones(chunk):
    hidden, weight, labels, upstream = problem()
    logprobs, _ = vocab_logprobs(hidden.bfloat16(), weight.bfloat16(), HeadTask(labels, chunk=chunk))
    (grad,) = torch.autograd.grad(logprobs, weight, upstream)
    expected, _ = vocab_logprobs(hidden, weight, HeadTask(labels))
    (oracle,) = torch.autograd.grad(expected, weight, upstream)
    assert logprobs.dtype == torch.float32
    assert (logprobs - expected).abs().max() < 0.1
    assert (grad.float() - oracle).norm() < 0.02 * oracle.norm()


def test_a_rank_without_loss_tokens_still_has_a_backward_pass_of_zeros():
    hidden, weight, labels, _ = problem()
    logprobs, entropy = vocab_logprobs(hidden[:0], weight, HeadTask(labels[:0]))
    grads = torch.autograd.grad(logprobs.sum(), (hidden, weight), allow_unused=True)
    assert logprobs.shape == entropy.shape == (0,)
    assert all(g.abs().max() == 0 for g in grads)


def test_a_frozen_head_costs_no_gradient_of_its_weight():
    hidden, weight, labels, upstream = problem()
    logprobs, _ = vocab_logprobs(hidden, weight.detach(), HeadTask(labels, chunk=16))
    (grad,) = torch.autograd.grad(logprobs, hidden, upstream)
    (oracle,) = torch.autograd.grad(naive(hidden, weight, labels, 1.0, 40)[0], hidden, upstream.double())
    torch.testing.assert_close(grad, oracle, rtol=1e-4, atol=1e-5)


def test_in_float64_the_gradient_is_that_of_finite_differences():
    hidden, weight, labels, _ = problem(num_tokens=3)
    inputs = (hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_())
    assert torch.autograd.gradcheck(
        lambda h, w: vocab_logprobs(h, w, HeadTask(labels, temperature=0.7, vocab_size=37, chunk=16))[0],
        inputs,
        fast_mode=True,
    )


def products(function) -> int:
    """Matrix products that `function` runs."""
    with CountProducts() as counted:
        function()
    return counted.products


class CountProducts(TorchDispatchMode):
    products = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.products += operation.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_)
        return operation(*args, **kwargs or {})


@pytest.mark.parametrize(("early", "expected"), [("none", 4), ("right", 3), ("partly wrong", 6)])
def test_an_early_gradient_saves_a_product_and_a_wrong_one_costs_time_only(early, expected):
    hidden, weight, labels, upstream = problem()
    early_gradients = {
        "none": None,
        "right": lambda rows, logprobs: (upstream[rows],),
        "partly wrong": lambda rows, logprobs: (torch.where(torch.arange(11)[rows] < 5, upstream[rows], 0.0),),
    }
    grads = []

    def step():
        logprobs, _ = vocab_logprobs(
            hidden, weight, HeadTask(labels, temperature=0.7, vocab_size=37, chunk=4, upstream=early_gradients[early])
        )
        grads.extend(torch.autograd.grad(logprobs, (hidden, weight), upstream))

    assert products(step) == expected * 3  # chunks
    oracles = torch.autograd.grad(naive(hidden, weight, labels, 0.7, 37)[0], (hidden, weight), upstream.double())
    for grad, oracle in zip(grads, oracles, strict=True):
        torch.testing.assert_close(grad, oracle, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("right", [True, False])
def test_with_a_flag_the_early_gradients_are_taken_and_the_flag_tells_whether_they_were_wrong(right):
    hidden, weight, labels, upstream = problem()
    differs, early = torch.zeros(1, dtype=torch.bool), upstream if right else upstream.roll(1)
    logprobs, _ = vocab_logprobs(
        hidden, weight, HeadTask(labels, chunk=4, upstream=lambda rows, _: (early[rows],), early_differs=differs)
    )
    assert products(lambda: torch.autograd.grad(logprobs, (hidden, weight), upstream)) == 0
    assert differs.item() is not right


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("early", [False, True])
def test_the_heads_gradient_is_added_to_its_float32_sum_unrounded(early, dtype):
    hidden, weight, labels, upstream = problem()
    hidden, weight = hidden.detach().to(dtype).requires_grad_(), weight.detach().to(dtype).requires_grad_()
    flag = torch.zeros(1, dtype=torch.bool)
    options = {"upstream": lambda rows, _: (upstream[rows],), "early_differs": flag} if early else {}
    logprobs, _ = vocab_logprobs(hidden, weight, HeadTask(labels, vocab_size=37, chunk=4, **options))
    passed_on = torch.autograd.grad(logprobs, (hidden, weight), upstream)
    weight.main_grad = torch.zeros(40, 16)
    logprobs, _ = vocab_logprobs(
        hidden, weight, HeadTask(labels, vocab_size=37, chunk=4, into_main_grad=True, **options)
    )
    logprobs.backward(upstream)
    assert weight.grad is None and torch.equal(hidden.grad, passed_on[0])
    torch.testing.assert_close(weight.main_grad.to(dtype), passed_on[1])
    assert dtype == torch.float32 or not torch.equal(weight.main_grad, passed_on[1].float())
    once = weight.main_grad.clone()
    logprobs, _ = vocab_logprobs(
        hidden, weight, HeadTask(labels, vocab_size=37, chunk=4, into_main_grad=True, **options)
    )
    logprobs.backward(upstream)
    torch.testing.assert_close(weight.main_grad, 2 * once)


def test_a_gradient_that_is_nan_early_and_later_is_not_wrong():
    hidden, weight, labels, upstream = problem()
    differs, early = torch.zeros(1, dtype=torch.bool), upstream.clone().index_fill(0, torch.tensor([2]), torch.nan)
    logprobs, _ = vocab_logprobs(
        hidden, weight, HeadTask(labels, upstream=lambda rows, _: (early[rows],), early_differs=differs)
    )
    torch.autograd.grad(logprobs, (hidden, weight), early)
    assert not differs


def test_early_gradients_may_depend_on_the_logprobs():
    hidden, weight, labels, _ = problem()
    seen = []

    def upstream(rows, logprobs):
        seen.append(logprobs)
        return (2 * logprobs,)

    logprobs, _ = vocab_logprobs(hidden, weight, HeadTask(labels, chunk=4, upstream=upstream))
    assert torch.equal(torch.cat(seen), logprobs)
    assert products(lambda: torch.autograd.grad(logprobs.square().sum(), (hidden, weight))) == 0


def test_without_a_gradient_to_compute_there_are_no_early_gradients():
    hidden, weight, labels, _ = problem()
    with torch.no_grad():
        assert products(lambda: vocab_logprobs(hidden, weight, HeadTask(labels, chunk=4, upstream=pytest.fail))) == 3


@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize("chunk", [3, 64])
def test_the_gradient_of_the_entropy_is_that_of_autograd(chunk, cap):
    hidden, weight, labels, _ = (t.detach().double() if t.is_floating_point() else t for t in problem())
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    upstream = torch.randn(2, 11, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    found = vocab_logprobs(
        *leaves, HeadTask(labels, temperature=0.7, logit_cap=cap, vocab_size=37, chunk=chunk, entropy_gradient=True)
    )
    expected = naive(*leaves, labels, 0.7, 37, cap)
    grads, oracles = (torch.autograd.grad(pair, leaves, tuple(upstream)) for pair in (found, expected))
    for value, oracle in zip((*found, *grads), (*expected, *oracles), strict=True):
        torch.testing.assert_close(value, oracle, rtol=1e-12, atol=1e-13)
    assert not vocab_logprobs(*leaves, HeadTask(labels, chunk=chunk))[1].requires_grad


def test_an_early_gradient_of_the_entropy_saves_the_same_product():
    hidden, weight, labels, upstream = problem()
    options = dict(temperature=0.7, vocab_size=37, chunk=4, entropy_gradient=True)

    def early_gradients(rows, logprobs, entropy):
        return upstream[rows], 2 * entropy

    def grads(**more):
        logprobs, entropy = vocab_logprobs(hidden, weight, HeadTask(labels, **options, **more))
        return torch.autograd.grad((logprobs * upstream).sum() + entropy.square().sum(), (hidden, weight))

    assert products(lambda: grads(upstream=early_gradients)) == 3 * 3  # chunks
    for early, late in zip(grads(upstream=early_gradients), grads(), strict=True):
        assert torch.equal(early, late)


@pytest.mark.parametrize("cap", [None, 3.0])
def test_the_entropy_of_what_a_sampler_keeps_has_the_gradient_of_autograd(cap):
    hidden, weight, labels, _ = (t.detach().double() if t.is_floating_point() else t for t in problem())
    leaves, rules = (hidden.requires_grad_(), weight.requires_grad_()), Truncation(top_p=0.8, top_k=10)
    options = dict(temperature=0.7, logit_cap=cap, truncation=rules, vocab_size=37, chunk=4)
    _, entropy = vocab_logprobs(*leaves, HeadTask(labels, **options, entropy_gradient=True))
    logits = (hidden @ weight.t())[:, :37]
    logits = (logits if cap is None else cap * torch.tanh(logits / cap)) / 0.7
    kept = truncated_log_softmax(logits.detach(), labels, rules).isfinite()
    log_p = logits.masked_fill(~kept, -1e30).log_softmax(-1)
    expected = -(log_p.exp() * log_p.masked_fill(~kept, 0.0)).sum(-1)
    for found, oracle in zip(
        (entropy, *torch.autograd.grad(entropy.square().sum(), leaves)),
        (expected, *torch.autograd.grad(expected.square().sum(), leaves)),
        strict=True,
    ):
        torch.testing.assert_close(found, oracle, rtol=1e-11, atol=1e-12)


def test_capped_logits_that_a_sampler_drops_leave_float32_gradients_finite():
    hidden, weight, labels, upstream = problem()
    logprobs, _ = vocab_logprobs(
        hidden, weight, HeadTask(labels, logit_cap=3.0, truncation=Truncation(top_k=3), chunk=4)
    )
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(logprobs, (hidden, weight), upstream))
