"""Whole runs of a tiny model on GPUs: servers on the trainer's GPU and on a separate GPU, and every weight sync
transport."""

import pytest

from megagrpo.platform import device
from tests.e2e import world
from tests.gpu.places import need_gpus

SETTINGS = (
    "model.precision=bf16",
    "rollout.gpu_memory_utilization=0.2",
    "rollout.enforce_eager=true",
    "rollout.mismatch_threshold=1.05",
)
CASES = {
    "colocated": (1, "cuda_ipc", ()),
    "colocated, through shared memory": (1, "shared_memory", ("rollout.weight_sync_transport=shared_memory",)),
    "dedicated": (2, "p2p", ("rollout.placement=dedicated",)),
    "dedicated to two ranks": (
        3,
        "p2p",
        ("rollout.placement=dedicated", "parallel.tp=2", "parallel.sequence_parallel=true"),
    ),
    "two servers on two ranks' GPUs": (2, "cuda_ipc", ("rollout.servers=2",)),
}
ON_CPU = "colocated"  # without a GPU, weights go through shared memory


def cases():
    for name, (gpus, transport, words) in CASES.items():
        yield pytest.param(gpus, transport, words, id=name, marks=pytest.mark.gpu)
    yield pytest.param(0, "shared_memory", CASES[ON_CPU][2], id="cpu", marks=pytest.mark.full)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("gpus", "transport", "words"), [*cases()])
def test_a_run_takes_its_steps_and_server_and_trainer_agree(gpus, transport, words, tmp_path):
    need_gpus(gpus)
    ranks = gpus - ("rollout.placement=dedicated" in words)
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(device.visible_gpus()[:gpus])} if gpus else {}
    process = world.start(tmp_path, *SETTINGS, *words, launched=True, NPROC=str(max(1, ranks)), **visible)
    run = world.finish(process, tmp_path, seconds=800)
    assert run.code == 0, run.out + run.err
    assert f"weight sync: {transport} (" in run.out
    assert len(run.metrics) == 2 and run.metrics[-1]["weight_version"] == 3
    assert all(line["token_mult_prob_error"] < 1.05 and line["grad_norm"] > 0 for line in run.metrics)
