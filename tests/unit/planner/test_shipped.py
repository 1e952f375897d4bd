"""Each shipped config for GPUs is the layout that megagrpo plan --search finds first for its GPUs, and its checkpoint fits
the RAM of their nodes."""

from pathlib import Path

import pytest

from megagrpo.cluster.launch.job import Cluster, place
from megagrpo.config import load_config
from megagrpo.families.hf_config import load_hf_config
from megagrpo.families.weight_sources import shape_folder
from megagrpo.planner.costs.engine_memory import ServerMemory
from megagrpo.planner.costs.gpu_specs import GPUS
from megagrpo.planner.costs.planned_memory import run_memory
from megagrpo.planner.costs.workload import expected_lengths
from megagrpo.planner.times.layout_search import search
from megagrpo.planner.times.step_times import step_times
from tests.unit.for_each import for_each

CONFIGS = Path(__file__).parents[3] / "configs"
SHIPPED = {  # GPUs of a node, and their kind
    "qwen3_0.6b_1gpu": (1, "h100"),
    "llama3.1_8b_gsm8k_lora_1gpu": (1, "h100"),
    "qwen2.5_7b_1node": (8, "h100"),
    "qwen3_30b_a3b_1node": (8, "h200"),
    "qwen3_30b_a3b_4nodes": (8, "h100"),
    "qwen3_32b_2nodes": (8, "h200"),
    "llama3.1_70b_8nodes": (8, "h100"),
    "qwen3_235b_a22b_16nodes": (8, "h100"),
    "deepseek_v3_32nodes": (8, "b200"),
}
RAM_GIB = 1862  # 2 TB, the RAM of a DGX
ROOM_BESIDE_VLLM_GIB = 10  # for a reload, CUDA graphs and NCCL


def test_every_shipped_config_for_gpus_is_here():
    assert {path.stem for path in CONFIGS.glob("*.yaml") if not path.stem.startswith("quickstart")} == set(SHIPPED)


@pytest.mark.full
@for_each("name", SHIPPED)
def test_the_layout_is_the_first_that_the_search_finds(name):
    gpus, kind = SHIPPED[name]
    config, gpu = load_config(CONFIGS / f"{name}.yaml"), GPUS[kind]
    model, lengths = load_hf_config(shape_folder(config.model.path)), expected_lengths(config)
    world = place(config.run.nodes, config.rollout, Cluster(gpus_per_node=gpus)).world_size
    (best,) = search(config, model, world, gpu, lengths, keep=1)
    assert step_times(config, model, world, gpu, lengths) == best.times, " ".join(best.overrides)
    assert load_config(CONFIGS / f"{name}.yaml", best.overrides) == config
    comment = " ".join((CONFIGS / f"{name}.yaml").read_text().replace("\n#", "").split())
    assert gpus == 1 or f"the layout that megagrpo plan --search finds for {kind}" in comment
    assert sum(run_memory(config, model, world, gpu.memory_gib).host.values()) < RAM_GIB


@for_each("name", SHIPPED)
def test_vllm_gets_the_memory_that_offloading_frees_and_leaves_room(name):
    config, gpu = load_config(CONFIGS / f"{name}.yaml"), GPUS[SHIPPED[name][1]]
    engine = ServerMemory.of(config, load_hf_config(shape_folder(config.model.path))).parts(gpu.memory_gib)
    assert config.rollout.gpu_memory_utilization >= (0.8 if config.takes_turns else 0.9)
    assert gpu.memory_gib - engine["vllm_weights"] > ROOM_BESIDE_VLLM_GIB
