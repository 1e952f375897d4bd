"""Transformer Engine's layers without a GPU, with kernels in torch (te_kernels.py): their step equals ours for every
family, in layouts, in FP8, and with weights in FP8."""

import functools
import importlib.util
from typing import Any

import pytest
import torch
from ranks import run_ranks
from te_kernels import replace_kernels
from te_manifest import CASES, architecture
from tiny_policy import MORE_SHAPES, RELEASED, SHAPES, tiny_run

from megagrpo.config import ParallelSection
from megagrpo.families.shared.architecture import HfConfig
from megagrpo.platform import device
from megagrpo.policy.fp8.fp8_settings import Fp8
from megagrpo.policy.fp8.products import CurrentScaling, Product
from megagrpo.proof.verify.shrink import random_samples, shrink_model
from megagrpo.proof.verify.verified_step import Outcome, take_step
from megagrpo.proof.verify.verify_compare import distances, silent_tensors

HERE = importlib.util.find_spec("transformer_engine") is not None and not device.has_gpu()
pytestmark = [
    pytest.mark.te,
    pytest.mark.skipif(
        not HERE, reason="needs Transformer Engine where there is no GPU; where there is one make test-gpu shows more"
    ),
]
LIKE_OURS = 1e-5  # relative: the effect of another order of float32 sums
# Scores without a scale make rounding larger, and so do sums of xIELU's parts that cancel.
LARGER = {"apertus": 5e-5, "gemma4_text": 5e-5}  # of families
KNOWN = SHAPES | MORE_SHAPES | RELEASED


def small(shape: str) -> HfConfig:
    """Heads and widths in units of 64, cut by tp=2; families without a shape use their tiny model."""
    sizes = ParallelSection(tp=2, pp=2, ep=2)
    return shrink_model(KNOWN[shape], sizes, unit=64) if shape in KNOWN else architecture(shape)


def stepped(on_theirs: bool, *args: Any) -> Outcome:
    """`take_step` on Transformer Engine's layers or on ours. Megatron uses some of its kernels in either case."""
    replace_kernels()
    device.has_transformer_engine = lambda: on_theirs
    return take_step(*args)


ALREADY = {small(shape).family for shape in KNOWN}
FAMILIES = [*KNOWN, *(name for name in CASES if architecture(name).family not in ALREADY)]
LAYOUTS = {
    "tp2_sp": (2, "qwen2_untied", dict(tp=2, sequence_parallel=True)),
    "pp2": (2, "llama_tied", dict(pp=2)),
    "dp2": (2, "qwen3_tied", {}),
    "ep2": (2, "qwen3_moe", dict(ep=2)),
    "cp2": (2, "qwen2_untied", dict(cp=2)),  # with windows, so it uses our attention
    "tp2_ep2_etp1": (4, "qwen3_moe", dict(tp=2, ep=2, etp=1, sequence_parallel=True)),
}


OPTIONS = {
    "adapters": dict(lora=dict(rank=4)),
    "stored base": dict(lora=dict(rank=4), model=dict(base_storage="nf4")),
    "recompute full": dict(model=dict(recompute="full")),
    "recompute selective": dict(model=dict(recompute="selective")),
    "activations on the host": dict(model=dict(offload_activations=1.0)),
    "fused activation": dict(model=dict(fusions=["bias_activation"])),
}


@functools.cache
def ours(shape: str, rank: int = 0, **model: str) -> Outcome:
    """The step of one process without Transformer Engine; with a `rank`, of adapters."""
    lora = dict(rank=rank)
    run = tiny_run({}, model=dict(precision="fp32") | model, train=dict(share_prompts=False), lora=lora)
    return run_ranks(stepped, 1, False, run, small(shape), random_samples(), timeout=300)[0]


def theirs(
    shape: str,
    ranks: int = 1,
    parallel: dict | None = None,
    overlap: tuple[str, ...] = (),
    share: bool = False,
    rank: int = 0,
    **model: Any,
) -> Outcome:
    """The step with Transformer Engine's layers. With `share` responses share their prompts; with a `rank`, of
    adapters."""
    train = dict(share_prompts=share, distributed_optimizer=ranks > 1 or "fp8_param" in model)
    lora = dict(rank=rank)
    run = tiny_run(parallel or {}, model=dict(precision="fp32") | model, train=train, lora=lora)
    run = run.model_copy(update=dict(train=run.train.model_copy(update=dict(overlap=list(overlap)))))
    found = run_ranks(stepped, ranks, True, run, small(shape), random_samples(), timeout=300)[0]
    assert silent_tensors(found) == []
    return found


def furthest(found: Outcome, expected: Outcome) -> float:
    """The largest relative difference of everything but the stepped weights: Adam can flip their change where a
    gradient is near 0."""
    return max(error for (kind, _), error in distances(found, expected).items() if kind != "next weight")


@pytest.mark.parametrize("shape", FAMILIES)
def test_a_step_of_every_family_is_ours(shape):
    assert furthest(theirs(shape), ours(shape)) < LARGER.get(small(shape).family, LIKE_OURS)


@pytest.mark.parametrize("case", LAYOUTS)
def test_a_step_in_a_layout_is_ours_in_one_process(case):
    ranks, shape, parallel = LAYOUTS[case]
    assert furthest(theirs(shape, ranks, parallel), ours(shape)) < LIKE_OURS


@pytest.mark.parametrize("shape", FAMILIES)
def test_a_step_with_shared_prompts_is_the_one_without(shape):
    assert furthest(theirs(shape, share=True), ours(shape)) < LARGER.get(small(shape).family, LIKE_OURS)


@pytest.mark.parametrize("case", LAYOUTS)
def test_a_step_with_shared_prompts_in_a_layout_is_the_one_without(case):
    ranks, shape, parallel = LAYOUTS[case]
    assert furthest(theirs(shape, ranks, parallel, share=True), ours(shape)) < LIKE_OURS


@pytest.mark.parametrize("option", OPTIONS)
def test_a_step_with_an_option_is_ours(option):
    own = dict(train=dict(share_prompts=False)) | OPTIONS[option]
    run = tiny_run({}, **own | dict(model=dict(path="tiny", precision="fp32") | own.get("model", {})))
    expected, found = (
        run_ranks(stepped, 1, on_theirs, run, small("qwen3_untied"), random_samples(), timeout=300)[0]
        for on_theirs in (False, True)
    )
    assert silent_tensors(found) == [] and furthest(found, expected) < LIKE_OURS


def test_a_step_of_experts_with_a_fused_activation_is_ours():
    assert furthest(theirs("qwen3_moe", fusions=["bias_activation"]), ours("qwen3_moe")) < LIKE_OURS


def _products(recipe: str, hybrid: bool) -> list[float]:
    """Relative differences between a linear of Transformer Engine's, alone and behind a norm, and ours: output and both
    gradients."""
    replace_kernels()
    import transformer_engine.pytorch as te
    from megatron.core import fp8_utils
    from megatron.core.transformer.transformer_config import TransformerConfig

    fp8 = Fp8(recipe, hybrid)
    told = TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=1, **fp8.megatron_config())
    torch.manual_seed(0)
    weight, grad = 0.1 * torch.randn(320, 192), torch.randn(256, 1, 320) * torch.logspace(-3, 0, 256)[:, None, None]
    x, apart = torch.randn(256, 1, 192), []
    for kind, options in ((te.Linear, {}), (te.LayerNormLinear, dict(normalization="RMSNorm"))):
        linear = kind(192, 320, bias=False, params_dtype=torch.float32, device="cpu", **options)
        linear.weight.data.copy_(weight)
        own, inputs = weight.clone().requires_grad_(), [x.clone().requires_grad_() for _ in range(2)]
        with te.autocast(enabled=True, recipe=fp8_utils.get_fp8_recipe(told)):
            found = linear(inputs[0])
        normed = (
            inputs[1] * torch.rsqrt(inputs[1].square().mean(-1, keepdim=True) + linear.eps) if options else inputs[1]
        )
        expected = Product.apply(normed, own, CurrentScaling(fp8), None)
        found.backward(grad)
        expected.backward(grad)
        pairs = (found, expected), (inputs[0].grad, inputs[1].grad), (linear.weight.grad, own.grad)
        apart += [((one - other).norm() / other.norm()).item() for one, other in pairs]
        assert (expected - normed @ weight.t()).norm() / expected.norm() > 0.01  # differs from the result without FP8
    return apart


@pytest.mark.parametrize(
    ("recipe", "hybrid"), [("tensorwise", True), ("tensorwise", False), ("blockwise", True), ("blockwise", False)]
)
def test_all_products_in_fp8_are_ours(recipe, hybrid):
    assert max(run_ranks(_products, 1, recipe, hybrid)[0]) < 1e-6


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
@pytest.mark.parametrize("shape", ["llama_tied", "qwen3_moe"])
def test_a_step_in_fp8_is_ours_but_for_numbers_between_two(shape, recipe):
    found, expected, exact = theirs(shape, fp8_recipe=recipe), ours(shape, fp8_recipe=recipe), ours(shape)
    # A value between two FP8 numbers may round to either one, and changes everything after it: a few tokens, and all
    # gradients slightly. With one scale per tensor a last bit of its largest magnitude moves all its values: up to a
    # tenth of the noise, depending on the CPU.
    apart, noise = (
        (one.logprobs - other.logprobs).abs().median() for one, other in ((found, expected), (expected, exact))
    )
    assert apart < 0.2 * noise
    assert_like_noise(found, expected, exact)


def assert_like_noise(found: Outcome, expected: Outcome, exact: Outcome) -> None:
    """Gradients in FP8 differ from each other by less than from those without FP8."""
    gradients, of_fp8 = (
        {k: e for k, e in distances(a, b).items() if k[0] == "gradient"}
        for a, b in ((found, expected), (expected, exact))
    )
    assert sorted(gradients.values())[len(gradients) // 2] < 0.6 * sorted(of_fp8.values())[len(of_fp8) // 2]


@pytest.mark.parametrize(
    ("recipe", "shape", "ranks", "parallel"),
    [
        ("tensorwise", "llama_tied", 1, {}),
        ("blockwise", "llama_tied", 1, {}),
        ("tensorwise", "qwen3_tied", 1, {}),
        ("blockwise", "qwen3_moe", 2, dict(ep=2)),
    ],
)
def test_a_step_of_adapters_beside_fp8_is_ours_but_for_numbers_between_two(recipe, shape, ranks, parallel):
    lora = dict(rank=4)
    found = theirs(shape, ranks, parallel, fp8_recipe=recipe, **lora)
    expected, exact = ours(shape, fp8_recipe=recipe, **lora), ours(shape, **lora)
    assert found.gradients.keys() == expected.gradients.keys() and all(".lora_" in name for name in found.gradients)
    apart, noise = (
        (one.logprobs - other.logprobs).abs().median() for one, other in ((found, expected), (expected, exact))
    )
    assert 0 < noise and apart < 0.2 * noise
    assert_like_noise(found, expected, exact)


@pytest.mark.parametrize(
    ("recipe", "shape", "ranks", "parallel"),
    [
        ("blockwise", "llama_tied", 1, {}),
        ("blockwise", "qwen3_moe", 2, dict(ep=2)),
        ("tensorwise", "qwen2_untied", 2, dict(tp=2, sequence_parallel=True)),
    ],
)
def test_a_step_with_weights_kept_in_fp8_is_that_with_bf16_weights_bit_for_bit(recipe, shape, ranks, parallel):
    plain, kept = (
        theirs(shape, ranks, parallel, precision="bf16", fp8_recipe=recipe, **more)
        for more in (dict(fp8_param=False), dict(fp8_param=True))
    )
    assert torch.equal(kept.logprobs, plain.logprobs)
    assert all(torch.equal(kept.gradients[name], plain.gradients[name]) for name in plain.gradients)
    moved = {name: error for (kind, name), error in distances(kept, plain).items() if kind == "next weight"}
    assert all((0.005 < moved[name] < 0.05) == ("_proj.weight" in name) for name in moved)


@pytest.mark.parametrize("shape", ["qwen2_untied", "qwen3_moe"])
def test_a_rank_without_a_gpu_takes_a_step_beside_transformer_engine(shape):
    """Megatron then takes Transformer Engine's kernels for clipping and routers, unless we take them away."""
    settings = tiny_run({}, train=dict(max_grad_norm=1e-3))
    (found,) = run_ranks(take_step, 1, settings, small(shape), random_samples(), timeout=300)
    assert silent_tensors(found) == []


@pytest.mark.parametrize(
    ("overlap", "model"),
    [
        (("weight_gradients",), {}),
        (("weight_gradients",), dict(recompute="full")),
        (("experts", "weight_gradients"), {}),
    ],
    ids=["beside the dispatch", "recomputed", "beside another micro-batch"],
)
def test_delayed_weight_gradients_are_those_of_a_step_without_delay(overlap, model):
    delayed, plain = (theirs("qwen3_moe", 2, dict(ep=2), chosen, precision="bf16", **model) for chosen in (overlap, ()))
    assert torch.equal(delayed.logprobs, plain.logprobs)
    assert [n for n, gradient in plain.gradients.items() if not torch.equal(delayed.gradients[n], gradient)] == []
