import math
from dataclasses import replace

import pytest
import torch

from megagrpo.platform import device
from megagrpo.policy.lm_head.task import HeadTask
from megagrpo.policy.lm_head.top_logprobs import top_logprobs
from megagrpo.policy.lm_head.vocab_logprobs import vocab_logprobs
from megagrpo.train_types import RefHead, TopLogprobs
from tests.unit.for_each import for_each

VOCAB, PADDED, WIDTH = 37, 40, 16
MIX = 0.3
DIRECTIONS = ["forward", "reverse", "jensen_shannon", "skewed_forward", "skewed_reverse"]


def naive(hidden, weight, labels, ref_hidden, ref_weight, direction, temperature=1.0, cap=None, top=None):
    """logprobs and KL in float64, over the whole vocabulary at once."""
    logits = [(h.double() @ w.double().t())[:, :VOCAB] for h, w in ((hidden, weight), (ref_hidden, ref_weight))]
    log_p, log_q = (((z if cap is None else cap * torch.tanh(z / cap)) / temperature).log_softmax(-1) for z in logits)
    p, q = log_p.exp(), log_q.exp()
    if top:  # the other model's most likely tokens, and the rest as one outcome
        ids = q.topk(top).indices
        p, q = (torch.cat((x.gather(1, ids), 1 - x.gather(1, ids).sum(-1, keepdim=True)), -1) for x in (p, q))

    def kl(first, second):
        return (first * (first / second).log()).sum(-1)

    value = {
        "forward": lambda: kl(q, p),
        "reverse": lambda: kl(p, q),
        "jensen_shannon": lambda: MIX * kl(q, MIX * q + (1 - MIX) * p) + (1 - MIX) * kl(p, MIX * q + (1 - MIX) * p),
        "skewed_forward": lambda: kl(q, MIX * q + (1 - MIX) * p),
        "skewed_reverse": lambda: kl(p, (1 - MIX) * q + MIX * p),
    }[direction]()
    return log_p.gather(1, labels[:, None])[:, 0], value


def problem(num_tokens=11, distance=0.3, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_tokens, WIDTH, generator=generator, dtype=dtype)
    weight = torch.randn(PADDED, WIDTH, generator=generator, dtype=dtype)
    moved = [t + distance * torch.randn(t.shape, generator=generator, dtype=dtype) for t in (hidden, weight)]
    labels = torch.randint(0, VOCAB, (num_tokens,), generator=generator)
    upstream = torch.randn(2, num_tokens, generator=generator, dtype=dtype)
    return hidden.requires_grad_(), weight.requires_grad_(), labels, *moved, upstream


@for_each("chunk", [5, 16, 64])
@for_each("temperature", [1.0, 0.7])
@for_each("direction", DIRECTIONS)
@for_each("cap", [None, 3.0])
def test_value_and_gradient_equal_the_divergence_summed_over_the_vocabulary(cap, direction, temperature, chunk):
    hidden, weight, labels, ref_hidden, ref_weight, upstream = problem()
    options = dict(temperature=temperature, logit_cap=cap, vocab_size=VOCAB, chunk=chunk)
    ref = RefHead(ref_hidden, ref_weight, cap)
    logprobs, entropy, kl = vocab_logprobs(
        hidden, weight, HeadTask(labels, ref=ref, direction=direction, mix=MIX, **options)
    )
    expected = naive(hidden, weight, labels, ref_hidden, ref_weight, direction, temperature, cap)
    alone = vocab_logprobs(hidden, weight, HeadTask(labels, **options))
    torch.testing.assert_close((logprobs, entropy), alone, rtol=0, atol=0)
    torch.testing.assert_close(kl.double(), expected[1], rtol=1e-5, atol=1e-6)
    assert kl.mean() > 0.02
    grads = torch.autograd.grad((logprobs, kl), (hidden, weight), tuple(upstream))
    oracles = torch.autograd.grad(expected, (hidden, weight), tuple(upstream.double()))
    for grad, oracle in zip(grads, oracles, strict=True):
        assert oracle.norm() > 0
        torch.testing.assert_close(grad, oracle, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_in_float64_the_gradient_is_that_of_finite_differences(direction):
    hidden, weight, labels, ref_hidden, ref_weight, _ = problem(num_tokens=3, dtype=torch.float64)

    def outputs(h, w):
        logprobs, _, kl = vocab_logprobs(
            h, w, HeadTask(labels, ref=RefHead(ref_hidden, ref_weight), direction=direction, vocab_size=VOCAB, chunk=16)
        )
        return logprobs, kl

    assert torch.autograd.gradcheck(outputs, (hidden, weight), fast_mode=True)


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_padding_rows_take_no_part_whatever_they_hold(direction):
    hidden, weight, labels, ref_hidden, ref_weight, upstream = problem()
    with torch.no_grad():
        weight[VOCAB:] = 100.0
        ref_weight[VOCAB:] = torch.nan
    _, _, kl = vocab_logprobs(
        hidden, weight, HeadTask(labels, ref=RefHead(ref_hidden, ref_weight), direction=direction, vocab_size=VOCAB)
    )
    torch.testing.assert_close(
        kl.double(), naive(hidden, weight, labels, ref_hidden, ref_weight, direction)[1], rtol=1e-5, atol=1e-6
    )
    (grad,) = torch.autograd.grad(kl, weight, upstream[1])
    assert grad[VOCAB:].abs().max() == 0 < grad[:VOCAB].abs().max()


def most_likely(hidden, weight, k, **options):
    task = HeadTask(torch.zeros(len(hidden)).long(), vocab_size=VOCAB, **options)
    top = top_logprobs(hidden.detach(), weight.detach(), k, task)
    return TopLogprobs(top.logprobs, top.token_ids)


@for_each("early", [False, True])
@for_each("direction", DIRECTIONS)
@for_each("cap", [None, 3.0])
def test_the_most_likely_tokens_and_the_others_together_have_their_divergence_and_gradient(cap, direction, early):
    hidden, weight, labels, ref_hidden, ref_weight, upstream = problem(dtype=torch.float64)
    options = dict(temperature=0.7, logit_cap=cap, chunk=4)
    ref = most_likely(ref_hidden, ref_weight, 5, **options)
    task = HeadTask(labels, ref=ref, direction=direction, mix=MIX, vocab_size=VOCAB, **options)
    if early:
        task = replace(task, upstream=lambda rows, logprobs, kl: tuple(upstream[:, rows]))
    logprobs, _, kl = vocab_logprobs(hidden, weight, task)
    expected = naive(hidden, weight, labels, ref_hidden, ref_weight, direction, 0.7, cap, top=5)
    torch.testing.assert_close((logprobs, kl), expected, rtol=1e-9, atol=1e-9)
    grads = torch.autograd.grad((logprobs, kl), (hidden, weight), tuple(upstream))
    oracles = torch.autograd.grad(expected, (hidden, weight), tuple(upstream))
    for grad, oracle in zip(grads, oracles, strict=True):
        torch.testing.assert_close(grad, oracle, rtol=1e-8, atol=1e-9)
    own = replace(task, ref=most_likely(hidden, weight, 5, **options), upstream=None)
    _, _, kl = vocab_logprobs(hidden, weight, own)
    assert kl.abs().max() == 0
    assert all(g.abs().max() == 0 for g in torch.autograd.grad(kl, (hidden, weight), upstream[1]))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_policy_at_its_reference_has_divergence_and_gradient_exactly_zero(direction):
    hidden, weight, labels, _, _, upstream = problem()
    _, _, kl = vocab_logprobs(
        hidden,
        weight,
        HeadTask(
            labels, ref=RefHead(hidden.detach(), weight.detach()), direction=direction, vocab_size=VOCAB, chunk=16
        ),
    )
    grads = torch.autograd.grad(kl, (hidden, weight), upstream[1])
    assert kl.abs().max() == 0
    assert all(g.abs().max() == 0 for g in grads)


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_small_divergences_keep_their_digits(direction):
    hidden, weight, labels, ref_hidden, ref_weight, _ = problem(distance=1e-3)
    _, _, kl = vocab_logprobs(
        hidden,
        weight,
        HeadTask(labels, ref=RefHead(ref_hidden, ref_weight), direction=direction, vocab_size=VOCAB, chunk=16),
    )
    expected = naive(hidden, weight, labels, ref_hidden, ref_weight, direction)[1]
    assert 1e-7 < expected.mean() < 1e-5
    assert (kl.double() - expected).abs().max() < 5e-7


def test_distributions_without_common_ground_stay_finite():
    hidden = (torch.eye(2, WIDTH) * 100).requires_grad_()
    weight, ref_weight = torch.zeros(PADDED, WIDTH), torch.zeros(PADDED, WIDTH)
    weight[0], ref_weight[1] = 1.0, 1.0
    # the entropy of the mixture's choice between the two
    jensen = -MIX * math.log(MIX) - (1 - MIX) * math.log(1 - MIX)
    values = dict(zip(DIRECTIONS, (100.0, 100.0, jensen, -math.log(MIX), -math.log(MIX)), strict=True))
    for direction, value in values.items():
        task = HeadTask(torch.zeros(2).long(), ref=RefHead(hidden, ref_weight), direction=direction, mix=MIX)
        *_, kl = vocab_logprobs(hidden, weight, task)
        torch.testing.assert_close(kl, torch.full((2,), value), rtol=1e-5, atol=1e-5)
        assert torch.autograd.grad(kl.sum(), hidden)[0].isfinite().all()


def test_no_tokens_still_have_a_backward_pass_of_zeros():
    hidden, weight, labels, ref_hidden, ref_weight, _ = problem()
    _, _, kl = vocab_logprobs(
        hidden[:0], weight, HeadTask(labels[:0], ref=RefHead(ref_hidden[:0], ref_weight), direction="forward")
    )
    grads = torch.autograd.grad(kl.sum(), (hidden, weight))
    assert kl.shape == (0,)
    assert all(g.abs().max() == 0 for g in grads)


def test_another_direction_is_an_error_that_names_the_two():
    hidden, weight, labels, ref_hidden, ref_weight, _ = problem()
    with pytest.raises(ValueError, match="direction: 'both' is not one of forward, reverse"):
        vocab_logprobs(hidden, weight, HeadTask(labels, ref=RefHead(ref_hidden, ref_weight), direction="both"))


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_early_gradients_of_logprobs_and_kl_change_nothing(direction):
    hidden, weight, labels, ref_hidden, ref_weight, upstream = problem()
    results = []
    for early_gradients in (None, lambda rows, logprobs, kl: tuple(upstream[:, rows])):
        logprobs, _, kl = vocab_logprobs(
            hidden,
            weight,
            HeadTask(
                labels,
                ref=RefHead(ref_hidden, ref_weight),
                direction=direction,
                vocab_size=VOCAB,
                chunk=4,
                upstream=early_gradients,
            ),
        )
        results.append((logprobs, kl, *torch.autograd.grad((logprobs, kl), (hidden, weight), tuple(upstream))))
    for late, early in zip(*results, strict=True):
        assert torch.equal(late, early)


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_blocks_of_columns_change_nothing_but_rounding(direction, monkeypatch):
    hidden, weight, labels, ref_hidden, ref_weight, upstream = problem()

    def results():
        logprobs, entropy, kl = vocab_logprobs(
            hidden,
            weight,
            HeadTask(labels, ref=RefHead(ref_hidden, ref_weight), direction=direction, vocab_size=VOCAB, chunk=4),
        )
        return logprobs, entropy, kl, *torch.autograd.grad((logprobs, kl), (hidden, weight), tuple(upstream))

    whole = results()
    monkeypatch.setattr(device, "block_elements", lambda: 4 * 5)  # 8 blocks, the last one narrower
    torch.testing.assert_close(results(), whole, rtol=1e-5, atol=1e-6)
    oracle = naive(hidden, weight, labels, ref_hidden, ref_weight, direction)
    torch.testing.assert_close(results()[2].double(), oracle[1], rtol=1e-5, atol=1e-6)
