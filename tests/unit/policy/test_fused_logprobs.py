"""The fused log-probs against the chunked ones, under Triton's interpreter."""

from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
from interpreted_triton import interpret
from ranks import run_ranks
from torch.utils._python_dispatch import TorchDispatchMode

from megagrpo.platform import device
from megagrpo.policy.lm_head import fused_logprobs
from megagrpo.policy.lm_head.fp8 import FP8_BLOCK, in_fp8
from megagrpo.policy.lm_head.fused_logprobs import MAX_SPLITS, Tiles, chunk_tokens, num_splits
from megagrpo.policy.lm_head.task import HeadTask
from megagrpo.policy.lm_head.vocab_logprobs import vocab_logprobs
from megagrpo.types import Truncation

HIDDEN, VOCAB, TOKENS = 40, 100, 37  # no multiples of the tiles below


@dataclass
class Case:
    options: dict = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    early: bool = True
    num_tokens: int = TOKENS
    hidden_size: int = HIDDEN


CASES = {
    "plain": Case(),
    "temperature, padding": Case(dict(temperature=0.7, vocab_size=93), early=False),
    "cap, entropy": Case(dict(temperature=0.7, logit_cap=3.0, entropy_gradient=True, vocab_size=93)),
    "cap, entropy, again": Case(dict(logit_cap=3.0, entropy_gradient=True), early=False),
    "bfloat16": Case(dict(temperature=0.7, vocab_size=93), torch.bfloat16),
    "bfloat16, entropy, again": Case(dict(entropy_gradient=True), torch.bfloat16, early=False),
    "one token": Case(dict(vocab_size=64), num_tokens=1),
    "no tokens": Case(num_tokens=0),
}


def problem(case: Case) -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(len(case.options))
    hidden = torch.randn(case.num_tokens, case.hidden_size, generator=draw).to(case.dtype)
    weight = (torch.randn(VOCAB, case.hidden_size, generator=draw) * 3 * case.hidden_size**-0.5).to(case.dtype)
    labels = torch.randint(0, case.options.get("vocab_size", VOCAB), (case.num_tokens,), generator=draw)
    return hidden, weight, labels, torch.randn(2, case.num_tokens, generator=draw)


def answer(case: Case, hidden, weight, labels, arriving, **options) -> list[torch.Tensor]:
    """Log-probs, entropy, and the gradients of hidden states and head."""
    leaves = [t.detach().clone().requires_grad_() for t in (hidden, weight)]
    outputs = vocab_logprobs(*leaves, HeadTask(labels, **case.options, **options))
    taught = outputs if case.options.get("entropy_gradient") else outputs[:1]
    return [*(o.detach() for o in outputs), *torch.autograd.grad(taught, leaves, tuple(arriving[: len(taught)]))]


def compare(case: Case) -> None:
    hidden, weight, labels, upstream = problem(case)
    early_gradients = (lambda rows, *found: tuple(upstream[: len(found), rows])) if case.early else None
    group, rank, tp = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    expected = answer(case, hidden.float(), weight.float(), labels, upstream)
    shard = weight.chunk(tp)[rank]
    found = answer(case, hidden, shard, labels, upstream, group=group, fused=True, upstream=early_gradients)
    total = found[2].float()
    dist.all_reduce(total)
    found = [*found[:2], total, found[3].float()]
    expected[3] = expected[3].chunk(tp)[rank]
    # The gradients of logits, and gradients computed from them, are bfloat16 for bfloat16 inputs; values are float32
    # sums.
    loose = 0.01 if case.dtype == torch.bfloat16 else 1e-5
    for place, (got, want) in enumerate(zip(found, expected, strict=True)):
        error = (1e-5, 1e-5, loose, loose)[place]
        assert not want.numel() or (got - want).abs().max() <= error * want.abs().max(), (
            place,
            (got - want).abs().max(),
        )
    assert found[0].dtype == torch.float32


def compare_all(names: list[str]) -> None:
    interpret()
    for name in names:
        try:
            compare(CASES[name])
        except BaseException as error:
            raise AssertionError(name) from error


def test_values_and_gradients_are_those_of_the_chunked_path():
    run_ranks(compare_all, 1, ["temperature, padding", "bfloat16", "one token", "no tokens"])


@pytest.mark.full
def test_so_they_are_with_all_options():
    run_ranks(compare_all, 1, list(CASES))


def test_ranks_that_share_the_vocabulary_get_the_same():
    run_ranks(compare_all, 2, ["cap, entropy"])


@pytest.mark.full
def test_so_they_do_with_all_options():
    run_ranks(compare_all, 2, list(CASES))


@pytest.mark.parametrize("recipe", [pytest.param("tensorwise", marks=pytest.mark.full), "blockwise"])
def test_fp8_gives_the_distribution_of_the_rounded_factors_and_gradients_of_the_unrounded(recipe):
    run_ranks(compare_fp8, 1, recipe)


def compare_fp8(recipe: str) -> None:
    interpret()
    case = Case(dict(temperature=0.7, vocab_size=93), torch.bfloat16, num_tokens=20, hidden_size=144)
    hidden, weight, labels, upstream = problem(case)
    logprobs, entropy, *gradients = answer(case, hidden, weight, labels, upstream, fused=True, fp8=recipe)
    # padding scales nothing
    rounded, head = dense(in_fp8(hidden, recipe, 1), 1), dense(in_fp8(weight[:93], recipe, FP8_BLOCK), FP8_BLOCK)
    products = (rounded @ head.t()).requires_grad_()
    log_p = (products / 0.7).log_softmax(-1)
    expected = log_p.gather(1, labels[:, None])[:, 0]
    assert (logprobs - expected).abs().max() < 1e-4
    assert (entropy + (log_p.exp() * log_p).sum(-1)).abs().max() < 1e-4
    (grad,) = torch.autograd.grad(expected, products, upstream[0])
    assert gradients[1][93:].abs().max() == 0
    for got, want in zip(
        (gradients[0], gradients[1][:93]), (grad @ weight[:93].float(), grad.t() @ hidden.float()), strict=True
    ):
        assert (got.float() - want).abs().max() < 0.01 * want.abs().max()
    exact = answer(case, hidden, weight, labels, upstream)[0]
    assert 1e-3 < (logprobs - exact).abs().max() < 1  # rounding is visible, but small


def dense(factor, rows_per_block: int) -> torch.Tensor:
    """float32 values of FP8 numbers with scales."""
    values, scales = factor.values.float(), factor.scales
    if scales.dim() == 2:
        scales = scales.repeat_interleave(rows_per_block, 0).repeat_interleave(FP8_BLOCK, 1)[
            : values.shape[0], : values.shape[1]
        ]
    return values * scales


@pytest.mark.parametrize("recipe, rows_per_block", [("tensorwise", 1), ("blockwise", 1), ("blockwise", FP8_BLOCK)])
def test_fp8_copies_are_off_by_half_a_step_and_survive_zeros_and_outliers(recipe, rows_per_block):
    values = torch.randn(300, 200, generator=torch.Generator().manual_seed(0))
    values[:FP8_BLOCK, :FP8_BLOCK] = 0
    values[-1, -1] = 1000.0
    error = (dense(in_fp8(values, recipe, rows_per_block), rows_per_block) - values).abs()
    assert (error <= values.abs() / 16 + values.abs().max() * 2**-18).all()
    if recipe == "blockwise":
        assert error[0, FP8_BLOCK:].max() < 0.25 * values[0, FP8_BLOCK:].abs().max()
    with pytest.raises(ValueError, match="recipe: 'mxfp8' is not one of tensorwise, blockwise"):
        in_fp8(values, "mxfp8", 1)


def test_a_rank_that_holds_only_padding_agrees():
    run_ranks(compare_only_padding, 2)


def compare_only_padding() -> None:
    interpret()
    compare(Case(dict(vocab_size=VOCAB // 2)))


class Largest(TorchDispatchMode):
    """The bytes of the largest storage allocated inside, except the `given` tensors."""

    def __init__(self, *given: torch.Tensor):
        super().__init__()
        self.given, self.bytes = {t.untyped_storage().data_ptr() for t in given}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        for made in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() not in self.given:
                self.bytes = max(self.bytes, made.untyped_storage().nbytes())
        return result


def largest_of(vocab: int) -> tuple[int, int]:
    """The largest storage of a pass for log-probs, and of one with the gradient of hidden states."""
    interpret(Tiles(16, 512, 16), scratch=2**14)
    hidden, weight, labels, found = (
        torch.randn(16, 16).bfloat16(),
        torch.randn(vocab, 16).bfloat16(),
        torch.zeros(16).long(),
        [],
    )
    for teaches in (False, True):
        with Largest(hidden, weight) as largest, torch.set_grad_enabled(teaches):
            vocab_logprobs(
                hidden.requires_grad_(),
                weight,
                HeadTask(labels, fused=True, upstream=lambda rows, logprobs: (logprobs,)),
            )
        found.append(largest.bytes)
    return found[0], found[1]


def test_no_tensor_grows_with_the_vocabulary():
    ((small, _), (large, scratch)) = (run_ranks(largest_of, 1, vocab)[0] for vocab in (512, 1536))
    assert large <= max(small, MAX_SPLITS * 16 * 16)
    assert scratch <= 2**14  # all logits would take three times as much


def test_scratch_is_bounded_whatever_the_vocabulary():
    for vocab in (8, 1000, 32_000, 128_256, 151_936, 262_144, 2_000_000):
        for itemsize in (2, 4):
            tokens = chunk_tokens(vocab, itemsize, Tiles())
            held = tokens * (-(-vocab // 16) * 16 * itemsize + -(-vocab // Tiles().vocab) * 4)
            assert held <= fused_logprobs.SCRATCH_BYTES and tokens % Tiles().tokens == 0, (vocab, tokens)


@pytest.mark.parametrize(
    "blocks, tiles, processors, rounds",
    [(128, 594, 132, 576 + 24), (1, 594, 132, 5), (27, 594, 132, 126), (1, 1, 132, 1), (300, 8, 4, 600)],
)
def test_the_vocabulary_is_split_so_that_no_processor_waits(blocks, tiles, processors, rounds):
    splits = num_splits(blocks, tiles, processors)
    assert -(-blocks * splits // processors) * -(-tiles // splits) <= rounds
    assert 1 <= splits <= MAX_SPLITS


@pytest.mark.parametrize(
    "hidden, options, said",
    [
        (torch.ones(4, 8).bfloat16(), {}, None),
        (torch.ones(4, 8), {}, "the kernels multiply bfloat16, not float32"),
        (torch.ones(4, 6).bfloat16(), {}, "rows of 6 features of 2 byte"),
        (torch.ones(4, 8).bfloat16(), dict(fp8="blockwise"), "rows of 8 features of 1 byte"),
        (torch.ones(4, 8).bfloat16(), dict(truncation=Truncation(top_k=2)), "need sorted logits"),
    ],
)
def test_what_the_kernels_cannot_do_is_refused_by_name(hidden, options, said, monkeypatch):
    def ask():
        vocab_logprobs(
            hidden, torch.ones(3, hidden.shape[1]).to(hidden), HeadTask(torch.zeros(4).long(), fused=True, **options)
        )

    with pytest.raises(ValueError, match=said if "truncation" in options else "there is no GPU"):
        ask()
    if said:
        monkeypatch.setattr(device, "no_fused_kernels", lambda: None)
        with pytest.raises(ValueError, match=said):
            ask()


def test_exact_kl_is_refused():
    assert fused_logprobs.refusal(torch.bfloat16, 64, truncation=False, exact_kl=True).startswith("exact KL")
