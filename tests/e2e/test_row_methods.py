"""Runs on the responses of rows: their losses in every layout, their naive value, and what a stop and a resume keep."""

import io
import json
from contextlib import redirect_stderr, redirect_stdout

import pytest
import torch
from ranks import run_ranks

from megagrpo.__main__ import main
from tests.e2e import world
from tests.unit.for_each import for_each

ROWS = ("rewards.functions=[]", "run.max_steps=3", "rollout.num_generations=8")
TURNS = [
    [("user", "2 + 2?"), ("assistant", "4"), ("user", "and 3 + 3?"), ("assistant", "6")],
    [("system", "Add."), ("user", "7 + 1"), ("assistant", "8, I think")],
    [("user", "9 + 9"), ("assistant", "18")],
    [("user", "a" * 60), ("assistant", "b" * 30)],
]


def _train(words: list[str]) -> tuple[int, str]:
    torch.distributed.destroy_process_group()  # the command makes its own
    said = io.StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        code = main(["train", *words])
    return code, said.getvalue()


def train(output, ranks, *words):
    """A run on rows in this layout: its lines in metrics.jsonl, and its output."""
    own = world.arguments(output, *ROWS, *words, launched=True)
    (code, said), *_ = run_ranks(_train, ranks, own)
    assert code == 0, said
    return [json.loads(line) for line in (output / "run" / "metrics.jsonl").read_text().splitlines()], said


def losses(lines):
    return [value for line in lines for name, value in line.items() if name in ("loss", "eval/loss")]


@pytest.fixture(scope="module")
def sft(tmp_path_factory):
    """The words of a run of `megagrpo sft` on conversations."""
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    rows = [{"messages": [{"role": role, "content": text} for role, text in turns]} for turns in TURNS * 2]
    file.write_text("\n".join(map(json.dumps, rows)))
    return ["algorithm.loss_type=sft", f"data.train.source={file}", f"data.eval={{source: {file}, size: 3}}"]


@pytest.fixture(scope="module")
def whole(sft, tmp_path_factory):
    """Three steps of one rank."""
    output = tmp_path_factory.mktemp("whole")
    return output, *train(output, 1, *sft)


LAYOUTS = {
    "tp2_pp2": (4, "parallel.tp=2", "parallel.pp=2", "train.max_tokens_per_micro_batch=128"),
    "cp2_dp2": (4, "parallel.cp=2", "train.share_prompts=false"),
}


@for_each("layout", LAYOUTS)
def test_a_layout_has_the_losses_of_one_process(layout, sft, whole, tmp_path):
    ranks, *words = LAYOUTS[layout]
    assert losses(train(tmp_path, ranks, *sft, *words)[0]) == pytest.approx(losses(whole[1]), rel=2e-5)


def test_a_resumed_run_has_the_same_losses(sft, whole, tmp_path):
    train(tmp_path, 1, *sft, "run.max_steps=2", "train.lr_scheduler_type=constant")
    resumed, _ = train(tmp_path, 1, *sft, "--resume", "train.lr_scheduler_type=constant")
    assert [line["loss"] for line in resumed if "loss" in line] == [line["loss"] for line in whole[1] if "loss" in line]


def test_the_loss_is_the_mean_over_the_tokens_of_the_assistant(whole):
    """Against transformers in float64, for the model before the run and the one that the run leaves."""
    import transformers

    output, lines, _ = whole
    evaluations = [line["eval/loss"] for line in lines if "eval/loss" in line]
    for folder, loss in zip((world.folder() / "model", output / "run" / "model"), evaluations, strict=True):
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).requires_grad_(False)
        total, count = 0.0, 0
        for turns in TURNS[:3]:
            ids, mask = [], []
            for role, text in turns:
                for part, counts in (("<|start|>", False), (f"{role}\n{text}<|end|>", role == "assistant")):
                    own = tokenizer.encode(part)
                    ids, mask = ids + own, mask + [counts] * len(own)
            logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
            picked = logprobs[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
            total, count = total - float(picked[torch.tensor(mask[1:])].sum()), count + sum(mask[1:])
        assert loss == pytest.approx(total / count, rel=1e-5)


def test_rows_that_are_too_long_are_dropped_and_counted(whole):
    assert "2 of 8 rows are longer than rollout.max_prompt_length + max_completion_length 60 (longest: 1" in whole[2]
