"""The number of steps of a run, from `run.max_steps` or `run.num_train_epochs`, and its warm-up."""

import re

import pytest

from megagrpo.config import ConfigError, ProblemError, load_config
from megagrpo.planner import layout_notes
from megagrpo.planner.rules.code_problems import code_problems
from tests.unit.for_each import for_each

SMALLEST = "model: {path: m}\ndata: {train: {source: a.jsonl}}\nrewards: {functions: [{function: exact_number}]}\n"
EPOCHS = ["run.max_steps=null", "rollout.prompts_per_step=4"]


@pytest.fixture
def load(tmp_path):
    (tmp_path / "mine.yaml").write_text(SMALLEST)
    return lambda *overrides: load_config(tmp_path / "mine.yaml", overrides)


@for_each(
    ("epochs", "prompts", "steps"),
    [
        ("1", 24, 6),
        ("2", 25, 13),
        ("0.5", 24, 3),
        ("0.1", 24, 1),
        ("0.1", 1, 1),
        ("0.3", 40, 3),
        ("1.1", 200, 55),
        ("3", 1, 1),
    ],
)
def test_epochs_become_steps_rounded_up_without_errors_of_floats(load, epochs, prompts, steps):
    config = load(*EPOCHS, f"run.num_train_epochs={epochs}").with_num_prompts(prompts)
    assert config.run.num_steps == config.run.max_steps == steps and config.run.num_train_epochs == float(epochs)


def test_max_steps_takes_precedence_and_is_100_without_either(load):
    config = load("run.max_steps=7", "run.num_train_epochs=2")
    assert config.with_num_prompts(1000) is config and config.run.num_steps == 7
    for default in (load(), load("run.max_steps=null"), load("run.name=mine")):
        assert default.run.num_steps == default.run.max_steps == 100 and default.with_num_prompts(1000) is default
    with pytest.raises(AssertionError):
        _ = load("run.num_train_epochs=2").run.num_steps  # before the data are known


def test_rules_about_the_number_of_steps_hold_once_it_is_known(load):
    late = load(*EPOCHS, "run.num_train_epochs=1", "debug.dump_steps=[7]", "train.warmup_steps=9")
    assert late.with_num_prompts(40).run.num_steps == 10
    with pytest.raises(ProblemError) as raised:
        late.with_num_prompts(24)
    said = str(raised.value)
    assert (
        "train.warmup_steps: 9 exceeds the run's 6 optimizer steps" in said
        and "debug.dump_steps: step 7 is after the last step" in said
    )


@pytest.mark.parametrize(
    ("ratio", "total", "warmup"), [("0", 50, 0), ("0.1", 50, 5), ("0.1", 30, 3), ("0.05", 30, 2), ("0.9", 8, 8)]
)
def test_a_warmup_ratio_is_a_share_of_the_optimizer_steps_rounded_up_as_in_transformers(load, ratio, total, warmup):
    assert load(f"train.warmup_ratio={ratio}").train.warmup(total) == warmup


def test_two_warmups_and_a_ratio_of_everything_are_refused(load):
    assert load("train.warmup_steps=7").train.warmup(100) == 7
    with pytest.raises(
        ConfigError, match=re.escape("train.warmup_ratio: 0.1 and train.warmup_steps 7 both set the warm-up")
    ):
        load("train.warmup_steps=7", "train.warmup_ratio=0.1")
    with pytest.raises(ConfigError, match=r"train\.warmup_ratio: must be less than 1"):
        load("train.warmup_ratio=1")
    with pytest.raises(ConfigError, match=r"run\.num_train_epochs: must be greater than 0"):
        load("run.num_train_epochs=0")


MOVING = ("algorithm.beta=0.1", "algorithm.sync_ref_model=true")
HELD_OUT = ("data.eval={source: a}", "evaluation.sets={hard: {source: b, num_generations: 6, temperature: 1.0}}")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("evaluation.keep_best=reward", HELD_OUT[1]),
            "evaluation.keep_best: reward: there is no data.eval, and no set of that name",
        ),
        (
            ("evaluation.keep_best=pass@2", *HELD_OUT),
            "pass@2: 1 response(s) per prompt do not give it; choose pass@1, or change",
        ),
        (
            ("evaluation.keep_best=hard/pass@3", *HELD_OUT),
            "hard/pass@3: 6 response(s) per prompt do not give it; choose pass@1, pass@2, ",
        ),
        (
            ("evaluation.keep_best=maj@1", *HELD_OUT),
            "maj@1: 1 response(s) per prompt do not give it; choose pass@1, or change",
        ),
    ],
)
def test_names_of_metrics_that_never_come_are_refused(load, overrides, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        load(*overrides)
    for fits in ("reward", "pass@1", "hard/pass@4", "hard/pass@6", "hard/maj@6", "rewards/format", "hard/rewards/x"):
        assert load(*HELD_OUT, f"evaluation.keep_best={fits}")
    (note,) = [note for note in layout_notes(load(*MOVING), 1) if "reference" in note.text]
    assert (
        str(note)
        == "algorithm.ref_model_sync_steps: 512 is after the last step, run.max_steps 100, so the reference never moves"
    )
    assert [
        note
        for note in layout_notes(load(*MOVING, "algorithm.ref_model_sync_steps=100"), 1)
        if "reference" in note.text
    ] == []


def test_a_pass_function_is_one_of_the_rewards(load):
    (problem,) = code_problems(load("evaluation.pass_function=exact_numbr"))
    said = (
        "evaluation.pass_function: no reward function `exact_numbr`; did you mean `exact_number`?; name one of "
        "exact_number"
    )
    assert str(problem) == said
    assert not any(code_problems(load("evaluation.pass_function=exact_number")))
    assert not any(code_problems(load("evaluation.pass_function=x", "multi_turn.scheduler=math_tip_trick")))
