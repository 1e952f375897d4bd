"""The tower of a run with images in the plan: on the ranks that have it, in vLLM, and in the seconds of a step."""

import pytest

from megagrpo.config import load_config
from megagrpo.families.hf_config import parse_hf_config
from megagrpo.planner.costs.engine_memory import GIB, ServerMemory
from megagrpo.planner.costs.gpu_specs import GPUS
from megagrpo.planner.costs.planned_memory import run_memory, stage_memory
from megagrpo.planner.costs.workload import Lengths
from megagrpo.planner.times.step_times import step_times
from tests.unit.families.published_configs import MORE

BF16 = "model.precision=bf16"
PLAIN, DEEP = (parse_hf_config(MORE[name]) for name in ("Qwen2.5-VL 7B", "Qwen3-VL 8B"))


def config(*overrides, images=True):
    return load_config("megagrpo:quickstart", [f"data.images={images}".lower(), BF16, *overrides])


def towers(model, *overrides) -> list[float]:
    """GiB of the tower in each phase of each stage."""
    stages = stage_memory(config(*overrides), model, dp=1)
    assert all(len({parts.get("tower", 0.0) for parts in stage.values()}) == 1 for stage in stages), "in every phase"
    return [stage["train"].get("tower", 0.0) for stage in stages]


def test_each_rank_that_embeds_or_adds_features_has_the_whole_tower():
    size = 2 * PLAIN.vision.shape.parameters / GIB
    assert towers(PLAIN, "parallel.pp=4", "parallel.tp=2") == [size, 0, 0, 0]
    deep = 2 * DEEP.vision.shape.parameters / GIB
    assert towers(DEEP, "parallel.pp=4") == [deep, 0, 0, 0]
    assert towers(DEEP, "parallel.pp=4", "parallel.pipeline_layers=[1,1,1,33]") == [deep, deep, deep, 0]


def test_a_trained_tower_counts_as_parameters_of_the_first_stage():
    fixed = ("parallel.pp=2", "parallel.tp=2", "algorithm.beta=0.1", "train.distributed_optimizer=false")
    frozen = stage_memory(config(*fixed), PLAIN, dp=1)
    trained = stage_memory(config(*fixed, "model.freeze_vision_tower=false"), PLAIN, dp=1)
    assert trained[1] == frozen[1]
    found, before, size = trained[0]["train"], frozen[0]["train"], PLAIN.vision.shape.parameters / GIB
    # bytes of a bf16 weight, float32 gradient, float32 master with two moments, bf16 reference
    for part, of_each in dict(weights=2, gradients=4, optimizer=12, reference=2).items():
        assert found[part] - before[part] == pytest.approx(of_each * size), part
    assert "tower" not in found


def test_a_trained_tower_keeps_activations_of_the_images_of_its_micro_batches():
    sizes = ("train.max_tokens_per_micro_batch=4000", "rollout.max_prompt_length=600", "train.share_prompts=false")
    sizes += ("rollout.max_completion_length=200", "parallel.pp=2")
    patches, shape = 4 * 4000 * 600 / 800, PLAIN.vision.shape

    def kept(*overrides):
        """Elements per patch that the first and the last stage have more than with a frozen tower."""
        trained, frozen = (
            [stage["train"]["activations"] for stage in stage_memory(config(*sizes, *overrides, *more), PLAIN, dp=1)]
            for more in (["model.freeze_vision_tower=false"], [])
        )
        return [(a - b) * GIB / 2 / patches for a, b in zip(trained, frozen, strict=True)]

    assert kept() == pytest.approx([2 * 32 * shape.kept, 0])
    assert kept("model.recompute=full") == pytest.approx([2 * 32 * shape.width + shape.kept, 0])
    assert kept("parallel.vpp=2") == pytest.approx([4 * 32 * shape.kept, 0])


def test_without_images_there_is_none():
    stages = stage_memory(config(images=False), PLAIN, dp=1)
    assert all("tower" not in parts for parts in stages[0].values())


def test_a_server_divides_it_and_a_shared_gpu_keeps_it():
    more = ("rollout.tp=2", "rollout.servers=1", "rollout.placement=colocated")
    size = 2 * PLAIN.vision.shape.parameters
    servers = (ServerMemory.of(config(*more, images=images), PLAIN) for images in (True, False))
    assert float.__sub__(*(server.device_bytes() for server in servers)) == size / 2
    for phase, parts in run_memory(config(*more), PLAIN, 2, 80.0).phases.items():
        assert parts["tower"] == size / GIB, phase


def test_its_seconds_are_part_of_training_and_generation():
    lengths = Lengths(1000.0, 100.0, 200.0)
    args = PLAIN, 8, GPUS["h100"], lengths
    plain, seen = (step_times(config(images=images), *args).seconds for images in (False, True))
    trained = step_times(config("model.freeze_vision_tower=false"), *args).seconds
    assert trained["train"] - plain["train"] > 2.9 * (seen["train"] - plain["train"])
    assert seen["train"] > plain["train"] and seen["generate"] > plain["generate"]
    assert {name for name in plain if plain[name] != seen[name]} <= {"train", "generate"}
