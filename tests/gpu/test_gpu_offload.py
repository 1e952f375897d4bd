"""A trainer that offloads its GPU memory and reloads it: the memory left on the GPU, and all numbers unchanged. `cpu`
runs the same code where offloading frees no memory for others."""

from pathlib import Path

import pytest

from megagrpo.platform.parallel.spawn import run_ranks
from tests.gpu.places import PLACES, need

MODELS = {"gpu": "0.5b", "cpu": "tiny"}
LEFT_GIB = 0.5  # cuBLAS' workspaces, and memory that the allocator cannot free


def leave_and_come_back(folder: Path, model: str, precision: str, in_fp8: bool) -> tuple[float, float, bool, float]:
    """(GiB before and after leaving, whether all numbers are the same bit for bit, gradient norm of a step after
    that)."""
    import torch

    from benchmarks.gpu.pair import own_gib
    from benchmarks.gpu.setting import run_config, shape, write_shape
    from benchmarks.gpu.train_step import Case, samples_of, sizes_of
    from megagrpo.algorithms.losses import make_loss
    from megagrpo.algorithms.reductions import denominator
    from megagrpo.data.packing.sample_packing import pack, packing_rules
    from megagrpo.families.hf_config import load_hf_config
    from megagrpo.platform.parallel.layout import init_layout
    from megagrpo.policy.fp8.tensor import parts
    from megagrpo.policy.megatron_policy import MegatronPolicy
    from megagrpo.policy.reference import Reference
    from megagrpo.trainer.gpu.state_offload import Offload

    overrides = [
        f"model.precision={precision}",
        "algorithm.beta=0.1",
        "rollout.max_prompt_length=64",
        "rollout.max_completion_length=64",
    ]
    overrides += ["model.fp8_recipe=blockwise", "model.fp8_param=true"] * in_fp8
    config = run_config(write_shape(shape(model), folder), *overrides)
    layout = init_layout(config.parallel, config.run.seed)
    hf_config = load_hf_config(folder)
    torch.manual_seed(0)
    policy = MegatronPolicy(config, layout, hf_config)
    reference = Reference(policy)
    policy.weights_changed()
    batch = pack(
        samples_of(Case("", hf_config, config, sizes_of(config))), packing_rules(config, policy.shares_prompts)
    )
    arguments = (
        reference.annotate(batch),
        make_loss(config.algorithm),
        denominator(batch, config.algorithm.loss.average, 64),
    )
    policy.train_step(*arguments)
    offload = Offload(policy, reference)

    def numbers() -> list[torch.Tensor]:
        held = (
            *offload._of_weights(),
            *offload._of_state(),
            *(part for w in reference.weights for part in parts(w)),
            *policy.logprobs(batch),
        )
        return [t.detach().to("cpu", copy=True) for t in held]

    stayed, before = numbers(), own_gib()
    for _ in range(2):  # into new memory, and again into the same memory
        offload.offload_all()
        left = own_gib()
        offload.load_all()
    same = all(torch.equal(one, other) for one, other in zip(numbers(), stayed, strict=True))
    return before, left, same, policy.train_step(*arguments)["grad_norm"].value


@pytest.mark.timeout(900)
@pytest.mark.parametrize("in_fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("place", PLACES)
def test_a_trainer_leaves_its_gpu_and_comes_back_the_same(place, in_fp8, tmp_path):
    need(place)
    precision = "bf16" if place == "gpu" or in_fp8 else "fp32"
    before, left, same, norm = run_ranks(
        leave_and_come_back, 1, tmp_path, MODELS[place], precision, in_fp8, timeout=300
    )[0]
    assert same and 0 < norm < float("inf")
    if place == "gpu":
        assert left < LEFT_GIB < before / 10
