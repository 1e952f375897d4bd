"""Layouts over NCCL and Transformer Engine against one process: a world of one, and all available GPUs."""

import json

import pytest
from tiny_policy import SHAPES

from megagrpo.__main__ import main
from tests.gpu.places import need_gpus

RUN = """
model: {path: %s, precision: bf16}
data: {train: {source: unused.jsonl}}
rewards: {functions: [{function: exact_number}]}
rollout: {max_prompt_length: 40, max_completion_length: 24}
algorithm: {beta: 0.05}
train: {distributed_optimizer: true}
"""
DENSE, EXPERTS = ("llama_tied", "qwen2_untied", "qwen3_tied"), ("qwen3_moe",)
CASES = [
    ("dp=1", 1, DENSE),
    ("tp=2,sequence_parallel", 2, DENSE),
    ("dp=2", 2, DENSE),
    ("cp=2", 2, DENSE),
    ("pp=2,pipeline_layers=[10,14]", 2, DENSE),
    ("cp=4", 4, DENSE),
    ("cp=2,tp=2,sequence_parallel", 4, DENSE),
    ("cp=2,pp=2,vpp=2,pipeline_layers=[5,7,7,5]", 4, DENSE),
    ("cp=2,dp=2", 4, DENSE),
    ("tp=2,pp=2,dp=2,sequence_parallel", 8, DENSE),
    ("dp=1", 1, EXPERTS),
    ("ep=2,dp=2", 2, EXPERTS),
    ("ep=2,tp=2,etp=1,sequence_parallel", 2, EXPERTS),
    ("ep=2,etp=2,tp=2,dp=2,sequence_parallel", 4, EXPERTS),
]


@pytest.mark.gpu
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("layout", "gpus", "shape"), [(layout, gpus, shape) for layout, gpus, shapes in CASES for shape in shapes]
)
def test_layouts_on_gpus_take_the_step_of_one_process(layout, gpus, shape, tmp_path):
    need_gpus(gpus)
    (tmp_path / "config.json").write_text(json.dumps(SHAPES[shape]))
    (tmp_path / "run.yaml").write_text(RUN % tmp_path)
    assert main(["verify", str(tmp_path / "run.yaml"), "--layout", layout]) == 0
