"""Where a step of a mixture of experts makes the host wait for a fake GPU: once per layer with experts and forward pass,
for the tokens of each expert, and once per optimizer step for the metrics."""

import collections

import pytest
import torch
from host_waits import innermost_line
from tiny_policy import tiny_model, tiny_run

from megagrpo.proof.verify.shrink import random_samples
from tests.fake_gpu.runtime import needs_fake_gpu, on_gpus

pytestmark = [pytest.mark.fake_gpu, needs_fake_gpu, pytest.mark.timeout(600)]
SHAPE = "qwen3_moe"  # one of its layers is dense
# GPUs, parallel, model, how often the host waits in a layer: forward, and in a pass with backward
CASES = {
    "one GPU": (1, {}, {}, 1, 1),
    "expert parallel": (2, dict(ep=2), {}, 1, 1),
    "recomputed": (2, dict(ep=2), dict(recompute="full"), 1, 2),
}
USUAL = ("one GPU",)


def waits_of_passes(parallel: dict, model: dict) -> tuple[int, list[collections.Counter]]:
    """Layers with experts times micro-batches; and the waits of the log-probs and of a pass with backward, by place."""
    from megagrpo.algorithms.losses import make_loss
    from megagrpo.platform.parallel.layout import init_layout
    from megagrpo.policy.moe.router_losses import routers
    from megagrpo.proof.verify.verified_step import prepare
    from tests.fake_gpu import kernels

    kernels.project_line = innermost_line
    of_events: collections.Counter[str] = collections.Counter()
    synchronize = torch.cuda.Event.synchronize

    def counted(event: torch.cuda.Event) -> None:
        of_events[innermost_line()] += 1
        synchronize(event)

    torch.cuda.Event.synchronize = counted
    config = tiny_run(parallel, model=dict(path="tiny", precision="bf16") | model, train=dict(share_prompts=False))
    layout = init_layout(config.parallel, config.run.seed)
    policy, batch, _ = prepare(config, tiny_model(SHAPE), layout, random_samples())
    loss, passes = make_loss(config.algorithm), []
    for run in (lambda: policy.logprobs(batch), lambda: policy.backward(batch, loss, batch.num_tokens)):
        before = kernels.Kernels.active.waits.copy()
        of_events.clear()
        run()
        of_functions = kernels.Kernels.active.waits - before
        passes.append(collections.Counter({place: n for (_, place), n in of_functions.items()}) + of_events)
    units = len(batch.micro_batches) * len(list(routers(policy.chunks)))
    layout.close()
    return units, passes


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=[] if name in USUAL else pytest.mark.full) for name in CASES]
)
def test_the_host_waits_once_per_layer_with_experts(case):
    gpus, parallel, model, forward, backward = CASES[case]
    for units, (logprobs, step) in on_gpus(waits_of_passes, gpus, parallel, model):
        of_experts = [place for place in step if "moe/token_dispatcher.py" in place]
        assert units and len(of_experts) == 1, step
        assert logprobs == {of_experts[0]: forward * units}
        metrics = [place for place in step if place.startswith("policy/metric_sums.py")]
        assert step == {of_experts[0]: backward * units, metrics[0]: 1}
