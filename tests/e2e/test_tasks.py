"""Runs of several tasks: whole groups by weight, each with its own rewards, turns and sampling."""

import json
from statistics import fmean, stdev

import pytest

from tests.e2e import world

AGAIN = '''
"""A scheduler, an agent with two roles and a data source of the tests."""

import openai

openai.OpenAI(api_key="none")  # imports once what each conversation, a fork, would import


def duel(prompt):
    client = openai.OpenAI()

    def ask(role, text):
        reply = client.chat.completions.create(model=f"policy:{role}", messages=[{"role": "user", "content": text}])
        return reply.choices[0].message.content

    answer = ask("solver", prompt)
    if len(answer) < 3:
        return {"solver": 0.0}
    verdict = ask("judge", answer[:5])
    return {"solver": len(answer) / 12, "judge": float(verdict[:1] < "a")}


def again(messages, turn, **columns):
    return [*messages, {"role": "user", "content": "?"}], turn == 2, float(turn)


class Backwards:
    """The rows from the last to the first."""

    def __init__(self, rows, seed):
        self.rows, self.count = list(rows), 0

    def next(self, count, progress):
        self.count += count
        return [self.rows[-1 - i % len(self.rows)] for i in range(self.count - count, self.count)]

    def learn(self, groups, progress):
        return {"groups": len(groups)}

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]
'''


def overrides(folder, *more, duel=True):
    (folder / "mine.py").write_text(AGAIN)
    rewards = f"{world.folder()}/rewards.py"
    rows = (world.folder() / "train.jsonl").read_text().splitlines(keepends=True)
    (folder / "eval.jsonl").write_text("".join(rows[:2]))
    tasks = [
        {"name": "low", "weight": 2 + (not duel), "data": {"source": f"{folder}/mine.py:Backwards"}},
        {
            "name": "talk",
            "data": {"eval": {"source": f"{folder}/eval.jsonl"}},
            "multi_turn": {"scheduler": f"{folder}/mine.py:again", "max_turns": 2, "max_response_length": 24},
            "rewards": {"functions": [{"function": f"{rewards}:seldom"}, {"function": f"{rewards}:low_bytes"}]},
            "loss_weight": 2.5,
            "rollout": {"num_generations": 2},
            "sampling": {"temperature": 0.5, "max_tokens": 6, "logit_bias": {"257": 3}},  # 257 ends a turn
        },
    ]
    if duel:
        agent = {"function": f"{folder}/mine.py:duel", "roles": {"solver": 1.0, "judge": 0.5}}
        half = {"functions": [{"function": f"{rewards}:low_bytes", "weight": 0.5}]}
        turns = {"agent": agent, "workers": 1}
        tasks.append({"name": "duel", "loss_weight": 0.5, "multi_turn": turns, "rewards": half})
    limits = ["algorithm.scale_rewards=batch", "evaluation.steps=2", "run.log_completions_steps=1"]
    limits += ["algorithm.loss_share_of_tasks=prompts", "algorithm.beta=0.04"]
    return [f"tasks={json.dumps(tasks)}", *limits, *more]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tasks")


@pytest.fixture(scope="module")
def run(folder):
    done = world.train(folder / "whole", *overrides(folder, "run.max_steps=3", "debug.dump_steps=[2]"))
    assert done.code == 0, done.err
    return done


def test_each_step_has_the_tasks_by_weight_and_each_response_its_tasks_rewards(run):
    for line in run.metrics:
        assert [line[f"tasks/{name}/groups"] for name in ("low", "talk", "duel", "duel/roles/solver")] == [2, 1, 1, 1]
        assert line["tasks/low/source/groups"] == 2
        assert line["token_mult_prob_error"] == pytest.approx(1, abs=1e-3)  # each task's own temperature
    names = {"low": {"low/low_bytes"}, "talk": {"talk/seldom", "talk/low_bytes", "talk/turns"}}
    names["duel"] = {"duel/low_bytes", "duel/solver", "duel/judge"}
    for row in run.completions:
        assert {*row["rewards"]} <= names[row["task"]] and len(row["rewards"]) >= len(names[row["task"]]) - 1
        assert ("dialogue" in row) == (row["task"] != "low")
    turns = [row["dialogue"]["turns"] for row in run.completions if row["task"] == "talk"]
    assert max(map(len, turns)) == 2 and all(turn["stop"] - turn["start"] <= 6 for own in turns for turn in own)


def test_the_log_warns_of_the_rows_and_rewards_of_each_task(run):
    assert "warning: tasks.talk.data.eval: 2 of 2 prompts are also in data.train" in run.out + run.err


def test_metrics_of_a_task_are_those_of_its_responses(run):
    of_step = [row for row in run.completions if row["step"] == 2 and row["task"] == "talk"]
    line = run.metrics[1]
    assert line["tasks/talk/reward"] == pytest.approx(sum(row["reward"] for row in of_step) / len(of_step))
    assert (
        [key for line in run.lines for key in line if key.startswith("eval/") and "pass@1" in key]
        == ["eval/talk/pass@1"] * sum("eval/talk/pass@1" in line for line in run.lines)
        != []
    )


def test_advantages_are_scaled_by_the_rewards_of_the_task(run):
    for name in ("low", "talk"):
        rows = [row for row in run.completions if row["step"] == 2 and row["task"] == name]
        rewards = [row["reward"] for row in rows]
        size = {"low": 4, "talk": 2}[name]
        assert len(rows) == {"low": 2, "talk": 1}[name] * size
        groups = [rewards[i - i % size :][:size] for i in range(len(rows))]
        expected = [(r - fmean(group)) / (stdev(rewards) + 1e-4) for r, group in zip(rewards, groups, strict=True)]
        assert [row["advantage"] for row in rows] == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_the_audit_of_a_step_scores_and_weighs_each_response_as_its_task_says(run):
    code, out = world.audit(run.folder, "--step", 2)
    assert code == 0 and "rewards" in out, out


def test_turns_have_advantages_in_the_task_that_has_turns(folder):
    by = ["algorithm.advantage_by=turn", "algorithm.scale_rewards=group", "evaluation.steps=0"]
    done = world.train(folder / "turns", *overrides(folder, *by, "run.max_steps=1", "debug.dump_steps=[1]", duel=False))
    assert done.code == 0, done.err
    code, out = world.audit(done.folder, "--step", 1)
    assert code == 0 and "turn advantages" in out, out


@pytest.mark.full
def test_a_resumed_run_draws_and_trains_the_same(run, folder):
    first = world.train(folder / "again", *overrides(folder, "run.max_steps=2"))
    assert first.code == 0, first.err
    second = world.train(folder / "again", *overrides(folder, "run.max_steps=3", "run.resume=true"))
    assert second.code == 0, second.err
    assert [row["completion"] for row in second.completions] == [row["completion"] for row in run.completions]
    assert second.metrics[-1]["grad_norm"] == run.metrics[-1]["grad_norm"]
