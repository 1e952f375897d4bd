"""Whole steps with more context parallelism than the covering set contains."""

import json

import pytest
from tiny_policy import SHAPES

from megagrpo.__main__ import main

RUN = """
model: {path: %s}
data: {train: {source: unused.jsonl}}
rewards: {functions: [{function: exact_number}]}
rollout: {max_prompt_length: 40, max_completion_length: 24}
algorithm: {beta: 0.05}
"""


def verify(folder, shape: str, precision: str, *layouts: str) -> int:
    (folder / "config.json").write_text(json.dumps(SHAPES[shape]))
    (folder / "run.yaml").write_text(RUN % folder)
    return main(
        [
            "verify",
            str(folder / "run.yaml"),
            f"model.precision={precision}",
            *(word for text in layouts for word in ("--layout", text)),
        ]
    )


@pytest.mark.full
def test_four_context_parallel_ranks_take_the_step_of_one_process(tmp_path):
    layouts = ("cp=4", "cp=4,tp=2,sequence_parallel", "cp=3,pp=2,pipeline_layers=[10,14]")
    assert verify(tmp_path, "qwen3_tied", "fp32", *layouts) == 0
