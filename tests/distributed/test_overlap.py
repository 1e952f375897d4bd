"""Steps with `train.overlap` are those without it, and nothing reads weights that are not gathered yet."""

from typing import Any

import pytest
import torch
from ranks import run_ranks
from te_manifest import architecture
from test_overlap_grad_reduce import BUCKETS, Training, config
from tiny_policy import tiny_model

from megagrpo.families.hf_config import HfConfig
from megagrpo.platform.parallel.layout import Layout
from megagrpo.policy.optimizer.policy_optimizer import gather_gradients
from megagrpo.proof.verify.verified_step import whole_tensors

# overlap, model, ranks, parallel, config.model
GATHERS: dict[str, tuple[list[str], str, int, dict, dict]] = {
    "dp2": (["param_gather"], "llama_tied", 2, {}, {}),
    "pp2 vpp2 dp2": (["param_gather"], "qwen3_untied", 4, dict(pp=2, vpp=2), {}),
    "experts": (["param_gather"], "qwen3_moe", 2, dict(ep=2), {}),
    "bf16": (["param_gather"], "qwen3_moe", 2, {}, dict(precision="bf16")),
    "fp8": (["param_gather"], "qwen2_untied", 2, {}, dict(precision="bf16", fp8_recipe="tensorwise", fp8_param=True)),
}
SHARED: dict[str, tuple[list[str], str, int, dict, dict]] = {
    "ep2": (["shared_experts"], "deepseek_v3", 2, dict(ep=2), {}),
    "tp2 ep2": (["shared_experts"], "deepseek_v3", 4, dict(tp=2, ep=2, etp=1, sequence_parallel=True), {}),
    "recomputed": (["shared_experts"], "deepseek_v2", 2, dict(ep=2), dict(recompute="full")),
}
BF16 = dict(precision="bf16")
EXPERTS: dict[str, tuple[list[str], str, int, dict, dict]] = {
    "beside ep2": (["experts"], "qwen3_moe", 2, dict(ep=2), BF16),
    "beside pp2 vpp2 ep2": (["experts"], "qwen3_moe", 4, dict(pp=2, vpp=2, ep=2), BF16),
    "beside shared": (["experts"], "deepseek_v3", 2, dict(ep=2), BF16),
    "beside tp2 ep2": (["experts"], "qwen3_moe", 4, dict(tp=2, ep=2, etp=1, sequence_parallel=True), BF16),
    "beside gather": (["experts", "param_gather"], "qwen3_moe", 4, dict(ep=2), BF16),
}
USUAL = ("dp2", "ep2", "beside ep2")
ANOTHER_ORDER = 1e-6  # relative: a sum of three float32 gradients in another order


def model_of(name: str) -> HfConfig:
    return architecture(name) if name.startswith("deepseek") else tiny_model(name)


def updates(settings: Any, model: HfConfig, layout: Layout | None = None) -> tuple[dict, list[dict], list[list]]:
    """Weights after two updates, their metrics, and the log-probs between them, which need gathered weights."""
    training, metrics, logprobs = Training(settings, model, layout), [], []
    for index, batch in enumerate(training.batches):
        found = training.policy.backward(batch, training.loss, batch.num_tokens) | training.policy.update()
        metrics.append({name: metric.value for name, metric in found.items()})
        logprobs.append(training.policy.logprobs(batch) if index == 0 else [])
    training.policy.finish_updates()
    return training.weights(), metrics, logprobs


def settings_of(parallel: dict, overlap: list[str], **model: Any) -> Any:
    made = config(parallel, distributed_optimizer=True, **BUCKETS)
    train = made.train.model_copy(update=dict(overlap=overlap))
    return made.model_copy(update=dict(train=train, model=made.model.model_copy(update=model)))


def cases(table: dict) -> list:
    return [pytest.param(*case, id=n, marks=[] if n in USUAL else pytest.mark.full) for n, case in table.items()]


@pytest.mark.full
@pytest.mark.parametrize(("overlap", "name", "ranks", "parallel", "model"), cases(GATHERS | EXPERTS))
def test_updates_and_log_probs_between_them_are_those_without_overlap(overlap, name, ranks, parallel, model):
    runs = [
        run_ranks(updates, ranks, settings_of(parallel, chosen, **model), model_of(name)) for chosen in (overlap, [])
    ]
    assert runs[0][0][0], "rank 0 has the whole weights"
    for (weights, metrics, logprobs), (plain, plain_metrics, plain_logprobs) in zip(*runs, strict=True):
        assert metrics == plain_metrics
        assert all(torch.equal(weights[key], tensor) for key, tensor in plain.items())
        for rows, plain_rows in zip(logprobs, plain_logprobs, strict=True):
            assert all(a is b is None or torch.equal(a, b) for a, b in zip(rows, plain_rows, strict=True))


def gradients(settings: Any, model: HfConfig, layout: Layout | None = None) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of a step and its summed gradients."""
    training = Training(settings, model, layout)
    batch = training.batches[0]
    loss = training.policy.backward(batch, training.loss, batch.num_tokens)["loss"].value
    gather_gradients(training.policy.model)
    return loss, whole_tensors(training.policy, model, training.layout, lambda p: p.main_grad)[0]


@pytest.mark.parametrize(("overlap", "name", "ranks", "parallel", "model"), cases(SHARED))
def test_gradients_are_those_without_overlap(overlap, name, ranks, parallel, model):
    (loss, found), (plain_loss, plain) = (
        run_ranks(gradients, ranks, settings_of(parallel, chosen, **model), model_of(name))[0]
        for chosen in (overlap, [])
    )
    assert loss == plain_loss and found.keys() == plain.keys()
    apart = {key: float((found[key] - plain[key]).norm() / plain[key].norm()) for key in plain}
    assert max(apart.values()) < ANOTHER_ORDER, max(apart, key=apart.__getitem__)


def delayed_gradients(settings: Any, model: HfConfig) -> tuple[dict[str, torch.Tensor], int, int]:
    """The summed gradients of a step whose linears in layers add a weight gradient when Megatron's schedule calls
    `backward_dw`, as those of Transformer Engine do; how many linears it called, and how many there are."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    training, called = Training(settings, model), set()
    modules = [pair for chunk in training.policy.chunks for pair in chunk.decoder.named_modules()]
    linears = [(name, each) for name, each in modules if isinstance(each, (ColumnParallelLinear, RowParallelLinear))]

    def delay(name: str, linear: Any) -> None:
        waiting: list[torch.Tensor] = []

        def keep(gradient: torch.Tensor) -> torch.Tensor:
            waiting.append(gradient)
            return torch.zeros_like(gradient)

        def backward_dw() -> None:
            called.add(name)
            while waiting:
                linear.weight.main_grad.add_(waiting.pop(0))

        linear.weight.register_hook(keep)
        linear.backward_dw = backward_dw

    for name, linear in linears:
        delay(name, linear)
    for _, module in modules:
        if hasattr(getattr(module, "config", None), "delay_wgrad_compute"):
            module.config.delay_wgrad_compute = True  # which Megatron allows with `overlap_moe_expert_parallel_comm`
    batch = training.batches[0]
    training.policy.backward(batch, training.loss, batch.num_tokens)
    gather_gradients(training.policy.model)
    found = whole_tensors(training.policy, model, training.layout, lambda p: p.main_grad)[0]
    return found, len(called), len(linears)


def test_every_delayed_weight_gradient_is_added():
    """Without Transformer Engine: attention, a dense MLP and experts."""
    settings, model = settings_of(dict(ep=2), ["experts"], **BF16), model_of("qwen3_moe")
    ranks = run_ranks(delayed_gradients, 2, settings, model)
    _, plain = run_ranks(gradients, 2, settings, model)[0]
    assert all(called == there > 0 for _, called, there in ranks)
    assert {key for key, tensor in plain.items() if not torch.equal(ranks[0][0][key], tensor)} == set()
