"""Messages beside computation over the NCCL of fake GPUs: steps with `train.overlap` are those without it, with and
without Transformer Engine's layers. Dispatchers whose package is missing are refused."""

from importlib.machinery import PathFinder

import pytest
import torch
from te_manifest import architecture
from test_overlap import ANOTHER_ORDER, EXPERTS, GATHERS, SHARED, gradients, model_of, settings_of, updates
from tiny_policy import tiny_run
from torch.utils._pytree import tree_map_only

from megagrpo.proof.verify.shrink import random_samples
from megagrpo.proof.verify.verified_step import Outcome, take_step
from tests.fake_gpu.runtime import needs_fake_gpu, on_gpus
from tests.gpu.test_gpu_parity import small

pytestmark = [pytest.mark.fake_gpu, needs_fake_gpu, pytest.mark.timeout(900)]
has_te = PathFinder.find_spec("transformer_engine") is not None
USUAL = ("experts", "ep2", "beside ep2", "beside the dispatch")


def both(function, settings: list, *arguments):
    """`function` of each of these settings, which have one layout, in host memory."""
    from megagrpo.platform.parallel.layout import init_layout

    layout = init_layout(settings[0].parallel)
    found = [function(each, *arguments, layout) for each in settings]
    return tree_map_only(torch.Tensor, torch.Tensor.cpu, found)


def cases(table: dict) -> list:
    return [pytest.param(*table[n], id=n, marks=[] if n in USUAL else pytest.mark.full) for n in table if n != "fp8"]


@pytest.mark.parametrize(("overlap", "name", "ranks", "parallel", "model"), cases(GATHERS | EXPERTS))
def test_updates_and_log_probs_between_them_are_those_without_overlap(overlap, name, ranks, parallel, model):
    settings = [settings_of(parallel, chosen, **model) for chosen in (overlap, [])]
    for (weights, metrics, logprobs), (plain, plain_metrics, plain_logprobs) in on_gpus(
        both, ranks, updates, settings, model_of(name)
    ):
        assert metrics == plain_metrics
        assert all(torch.equal(weights[key], tensor) for key, tensor in plain.items())
        for rows, plain_rows in zip(logprobs, plain_logprobs, strict=True):
            assert all(a is b is None or torch.equal(a, b) for a, b in zip(rows, plain_rows, strict=True))


@pytest.mark.parametrize(("overlap", "name", "ranks", "parallel", "model"), cases(SHARED))
def test_gradients_are_those_without_overlap(overlap, name, ranks, parallel, model):
    settings = [settings_of(parallel, chosen, **model) for chosen in (overlap, [])]
    (loss, found), (plain_loss, plain) = on_gpus(both, ranks, gradients, settings, model_of(name))[0]
    assert loss == plain_loss and found.keys() == plain.keys()
    apart = {key: float((found[key] - plain[key]).norm() / plain[key].norm()) for key in plain}
    assert max(apart.values()) < ANOTHER_ORDER, max(apart, key=apart.__getitem__)


def changed(run, section: str, **values):
    """The run with other values in one section. `tiny_run` drops what `megagrpo verify` cannot run."""
    return run.model_copy(update={section: getattr(run, section).model_copy(update=values)})


def with_te(runs: list, model) -> list[Outcome | None]:
    """The step of each run on Transformer Engine's layers."""
    from tests.fake_gpu.te import replace_kernels

    replace_kernels()
    return [take_step(run, model, random_samples()) for run in runs]


@pytest.mark.skipif(not has_te, reason="needs Transformer Engine")
@pytest.mark.parametrize(
    ("overlap", "shape", "model"),
    [
        pytest.param(["weight_gradients"], "qwen3_moe", {}, id="beside the dispatch"),
        pytest.param(
            ["weight_gradients"], "qwen3_moe", dict(recompute="full"), id="recomputed", marks=pytest.mark.full
        ),
        pytest.param(["experts", "weight_gradients"], "qwen3_moe", {}, id="in turns", marks=pytest.mark.full),
        pytest.param(["shared_experts"], "deepseek_v3", {}, id="shared", marks=pytest.mark.full),
    ],
)
def test_a_step_on_transformer_engines_layers_is_that_without_overlap(overlap, shape, model):
    run = tiny_run(
        dict(ep=2),
        model=dict(path="tiny", precision="bf16") | model,
        train=dict(share_prompts=False, distributed_optimizer=True),
    )
    runs = [changed(run, "train", overlap=chosen) for chosen in (overlap, [])]
    tiny = architecture(shape) if shape == "deepseek_v3" else small(shape)
    found, plain = on_gpus(with_te, 2, runs, tiny, MEGAGRPO_FAKE_GPU_TE="1")[0]
    assert torch.equal(found.logprobs, plain.logprobs)
    exact = "shared_experts" not in overlap
    for name, gradient in plain.gradients.items():
        apart = float((found.gradients[name] - gradient).norm() / gradient.norm())
        assert apart == 0 if exact else apart < ANOTHER_ORDER, name


def refused(dispatcher: str) -> str:
    """The error of a rank that checks its GPU for this dispatcher."""
    from megagrpo.policy.transformer.message_overlap import check_overlap

    run = changed(tiny_run(dict(ep=2)), "parallel", expert_dispatcher=dispatcher)
    with pytest.raises(ValueError) as raised:
        check_overlap(run.train, run.parallel, torch.bfloat16)
    return str(raised.value)


@pytest.mark.parametrize(("dispatcher", "package"), [("deepep", ""), ("hybridep", "the branch hybrid-ep of ")])
def test_a_dispatcher_without_its_package_is_refused(dispatcher, package):
    fix = "which is not installed; install it, or use alltoall"
    expected = f"parallel.expert_dispatcher: {dispatcher} needs {package}the package deep_ep, {fix}"
    assert on_gpus(refused, 1, dispatcher) == [expected]
