"""Evaluation during a run: evaluation sets with their own sampling, and the best checkpoint."""

import json

import pytest

from tests.e2e import world

SETS = """evaluation={sets: {easy: {source: FOLDER/eval.jsonl, size: 3, num_generations: 4, temperature: 1, top_k: 2,
  max_completion_length: 5}, hard: {source: FOLDER/eval.jsonl}}, pass_reward: 0.5, answer: text, keep_best: REWARD}"""


def sets(metric="easy/pass@1"):
    return sets_in("FOLDER", metric).replace("FOLDER", str(world.folder()))


def sets_in(folder, metric):
    return " ".join(SETS.replace("FOLDER", folder).replace("REWARD", metric).split())


def evaluations(run):
    return [line for line in run.lines if any(name.startswith("eval/") for name in line)]


def test_sets_are_evaluated_with_their_own_sampling_before_between_and_after(tmp_path):
    run = world.train(
        tmp_path, sets(), f"data.eval.source={world.folder()}/eval.jsonl", "evaluation.steps=2", "run.max_steps=3"
    )
    assert run.code == 0, run.err
    lines = evaluations(run)
    assert [line["step"] for line in lines] == [0, 2, 3]
    for line in lines:
        assert line["eval/easy/completions/max_length"] <= 5 < line["eval/hard/completions/max_length"] <= 12
        assert (
            line["eval/easy/pass@1"] <= line["eval/easy/pass@2"] <= line["eval/easy/pass@4"]
            and 0 <= line["eval/easy/maj@4"] <= 1
        )
        assert "eval/hard/pass@2" not in line and line["eval/hard/pass@1"] in (0, 0.25, 0.5, 0.75, 1)
        # both are greedy
        assert line["eval/hard/reward"] == line["eval/hard/rewards/low_bytes/mean"] == line["eval/reward"]
    shown = [line for line in run.out.splitlines() if line.startswith("evaluation after step 2")]
    assert [line.split("  reward")[0] for line in shown] == [
        "evaluation after step 2" + of for of in ("", " of easy", " of hard")
    ]


@pytest.mark.full
@pytest.mark.parametrize(
    "metric", [pytest.param("hard/reward", marks=pytest.mark.full), "easy/completions/max_length"]
)  # one that rises, one that is constant
def test_the_best_checkpoint_stays_beside_the_newest_and_a_resumed_run_knows_it(metric, tmp_path):
    options = [sets(metric), "evaluation.steps=1", "run.save_total_limit=1", "train.learning_rate=3e-3"]
    values = {}
    for steps, resume in ((2, []), (4, ["--resume"])):
        run = world.train(tmp_path, *options, f"run.max_steps={steps}", *resume)
        assert run.code == 0, run.err
        values |= {line["step"]: line[f"eval/{metric}"] for line in evaluations(run)}
        best = max(range(1, steps + 1), key=lambda step: (values[step], -step))  # the first of equal ones
        assert run.saved == sorted({"best", f"step_{best:06d}", f"step_{steps:06d}"})
        assert (run.folder / "checkpoints" / "best").resolve().name == f"step_{best:06d}"
        state = json.loads((run.newest / "megagrpo.json").read_text())["state"]
        assert (state["best_step"], state["best_value"]) == (best, values[best])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            sets_in("FOLDER", "easy/pass@3"),
            "evaluation.keep_best: easy/pass@3: 4 response(s) per prompt do not give it; choose pass@1, pass@2, pass@4",
        ),
        (
            "evaluation={sets: {bad: {source: FOLDER/eval.jsonl, prompt_column: question}}}",
            "evaluation.sets.bad.prompt_column: no column `question`",
        ),
        (
            "evaluation={sets: {bad: {source: FOLDER/eval.jsonl}}, pass_function: low_byte}",
            "evaluation.pass_function: no reward function `low_byte`; did you mean `low_bytes`?; name one of low_bytes",
        ),
        (
            "evaluation={sets: {bad: {source: FOLDER/few.jsonl}}}",
            "evaluation.sets.bad: rewards.functions: reward `low_bytes` needs column `answer`; the data set has",
        ),
        (
            "evaluation={sets: {bad: {source: FOLDER/eval.jsonl, max_completion_length: 500}}}",
            "evaluation.sets.bad.max_completion_length: max_prompt_length 48 + 500 = 548 tokens, but the model's "
            "limit is 256",
        ),
    ],
)
def test_what_cannot_be_evaluated_is_said_before_anything_is_trained(override, message, tmp_path):
    (world.folder() / "few.jsonl").write_text('{"prompt": "1"}\n')
    run = world.train(tmp_path, override.replace("FOLDER", str(world.folder())))
    assert run.code == 2 and message in run.err and run.metrics == []
