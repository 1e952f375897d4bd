"""What becomes of each published config.json: it loads, or the error leads somewhere."""

import re
import subprocess
import sys

from megagrpo.families.hf_config import parse_hf_config
from tests.unit.families.published_configs import MORE, PUBLISHED, outcomes

# What the user of a refused model can do next.
WAYS_OUT = (
    r"docs/add_a_model\.md shows how to (add one|write that file)",
    r"; use the original weights, or dequantize them with the program that wrote them$",
    r"; set \w+ to .+",
    r"remove it from a copy of config\.json",
    r"docs/add_a_model\.md$",
)
LOADED = ("Gemma 3 4B it", "Gemma 3 12B it", "Gemma 3 27B it", "Moonlight 16B A3B", "DeepSeek V3", "gpt-oss 20B")
LOADED += ("Gemma 4 31B it", "Gemma 4 E2B it", "Gemma 4 E4B it", "Gemma 4 26B-A4B it")
LOADED += ("GLM 4.1V 9B Thinking", "GLM 4.5V", "Qwen3.5 27B", "Qwen3.5 35B A3B", "Qwen3 Next 80B A3B FP8")
LOADED += ("Qwen2-VL 7B", "Qwen3-VL 8B", "Qwen3-VL 30B A3B")


def test_every_published_config_loads_or_is_refused_with_a_way_out():
    found = outcomes()
    assert len(found) >= 75 and all(found[name] == [] for name in (*PUBLISHED, *LOADED))
    for name, problems in found.items():
        for problem in problems:
            assert any(re.search(way, problem) for way in WAYS_OUT), f"{name}: {problem}"
            assert "name a folder with its text model" not in problem


def test_a_model_without_a_family_whose_parts_have_no_code_is_told_so():
    (problem,) = outcomes()["Gemma3n"]
    assert (
        "It needs AltUp, Laurel and activations of the largest values only, which megagrpo/policy does not" in problem
    )


def test_the_text_models_of_gemma_3_have_their_published_sizes():
    sizes = {name: parse_hf_config(MORE[name]) for name in LOADED[:3]}
    assert [(m.num_heads, m.num_kv_heads, m.head_dim) for m in sizes.values()] == [
        (8, 4, 256),
        (16, 8, 256),
        (32, 16, 128),
    ]


def test_the_script_prints_the_count():
    command = [sys.executable, "-m", "tests.unit.families.published_configs"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert re.fullmatch(r"\d+ load, \d+ refused of \d+", lines[-1])
    assert sum(line.rstrip().endswith(" loads") for line in lines) == int(lines[-1].split()[0])
