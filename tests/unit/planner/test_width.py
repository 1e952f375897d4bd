"""Plans and tables fit into 100 columns."""

import re
from pathlib import Path

from megagrpo.config import Problem, load_config
from megagrpo.planner import Plan, plan, with_times
from megagrpo.planner.costs.gpu_specs import GPUS
from megagrpo.planner.costs.workload import expected_lengths
from megagrpo.planner.plan_text import memory_table
from tests.unit.for_each import for_each

CONFIGS = Path(__file__).parents[3] / "configs"
SHIPPED = ["deepseek_v3_32nodes", "qwen3_235b_a22b_16nodes", "llama3.1_8b_gsm8k_lora_1gpu", "quickstart_2nodes"]


def widest(text: str) -> str:
    return max(text.splitlines(), key=len)


@for_each("name", SHIPPED)
@for_each(
    "overrides", [[], ["rollout.num_generations=7", "parallel.tp=3", "train.max_tokens_per_micro_batch=100000000"]]
)
def test_plans_of_shipped_configs_with_seconds_notes_and_problems(name, overrides):
    config = load_config(CONFIGS / f"{name}.yaml", overrides)
    world = config.parallel.smallest_world
    made = with_times(
        plan(config, world, GPUS["h100"].memory_gib), config, world, GPUS["h100"], expected_lengths(config)
    )
    assert not overrides or made.problems
    assert len(widest(str(made))) <= 100


def test_long_problems_are_wrapped_and_indented_and_a_wide_table_continues_below():
    long = Problem(("rollout.extra_args",), "a reason of many words " * 20 + "\n" + "its second line " * 10)
    text = str(Plan([long], [("layout", "a row of words " * 20)], notes=[long]))
    assert len(widest(text)) <= 100 and "1 note(s)" in text and "1 problem(s)" in text
    assert " ".join(text.split()).count("a reason of many words " * 20 + "its second line") == 2
    memory = {phase: {f"part_number_{i}": 123456.0 for i in range(12)} for phase in ("load", "generate", "backward")}
    for parts in memory.values():
        parts["total"] = sum(parts.values())
    table = "\n".join(memory_table(memory))
    assert len(widest(table)) <= 100 and len(re.findall(r"^load ", table, re.MULTILINE)) == 3
    assert all(f"part_number_{i}" in table for i in range(12)) and "1481472.00" in table
