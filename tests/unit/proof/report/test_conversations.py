"""Conversations on the page: turns, tool calls with results, branches, and what is left out of long ones."""

import json
import random

import pytest

from megagrpo.proof.report.collect import read_run
from megagrpo.proof.report.conversations import FIRST_ITEMS, MAX_BRANCHES, MAX_ITEMS, conversation_of
from megagrpo.proof.report.shown_responses import index_steps, read_group
from megagrpo.types import Turn
from tests.unit.proof.report.synthetic import branch_rows, called, conversations, make_conversations, talk, timed


def row_of(dialogue, **more) -> dict:
    return json.loads(json.dumps({"dialogue": dialogue.record(), **more}))


def test_a_call_has_its_result_and_a_turn_its_tokens_seconds_and_reward():
    (right, _), (wrong, _), (slow, _), _ = conversations(random.Random(0))
    shown = conversation_of(row_of(right), [], 1)
    assert [item["role"] for item in shown["items"]] == ["assistant"] * 3  # results are part of their calls
    first = shown["items"][0]["calls"][0]
    assert first == {"name": "calculator", "arguments": 'expression: "17*24"', "result": "408", "failed": False}
    assert [item["turns"] for item in shown["items"]] == [[0], [1], [2]]
    assert [(turn["tokens"], turn["after"]) for turn in shown["turns"]] == [(34, 12), (15, 12), (11, 0)]
    assert shown["turns"][1]["answered"] == 1.31 and shown["rewards"] == {"environment": 1.0}
    failed = conversation_of(row_of(wrong), [], 1)
    assert failed["items"][0]["calls"][0]["failed"] and failed["retries"] == 1
    assert [turn["reward"] for turn in failed["turns"]] == [-0.5, 0.25]
    unanswered = conversation_of(row_of(slow), [], 1)
    assert unanswered["ended"] == "time_limit" and "result" not in unanswered["items"][0]["calls"][0]
    assert "characters left out" in unanswered["items"][0]["calls"][0]["arguments"]


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [({"a": 1, "b": "x"}, 'a: 1, b: "x"'), ('{"a": [1]}', "a: [1]"), ("{broken", "{broken"), ("[1]", "[1]"), (None, ""),
     ({"a": "\u202e"}, 'a: "\\u202e"'), ('{"a": "\\u202e"}', 'a: "\\u202e"')],
)  # fmt: skip
def test_arguments_are_shown_as_in_a_call_and_without_control_characters(arguments, shown):
    dialogue = talk([called("f", arguments)], [Turn(0, 1)])
    assert conversation_of(row_of(dialogue), [], 0)["items"][0]["calls"][0]["arguments"] == shown


def test_results_find_their_calls_by_id_and_by_name():
    by_id = called("a", {}, call_id="1")
    by_id["tool_calls"] += called("a", {}, call_id="2")["tool_calls"]
    answers = [{"role": "tool", "tool_call_id": number, "content": number} for number in ("2", "1", "9")]
    shown = conversation_of(row_of(talk([by_id, *answers], [Turn(0, 1)])), [], 0)
    assert [call["result"] for call in shown["items"][0]["calls"]] == ["1", "2"]
    assert shown["items"][1] == {"role": "tool", "text": "9"}  # of no call
    by_name = called("a", {})
    by_name["tool_calls"] += called("b", {})["tool_calls"]
    answers = [{"role": "tool", "name": name, "content": name} for name in ("b", "a")]
    shown = conversation_of(row_of(talk([by_name, *answers], [Turn(0, 1)])), [], 0)
    assert [call["result"] for call in shown["items"][0]["calls"]] == ["a", "b"]


def test_branches_are_below_the_message_where_they_split():
    (right, _), *_ = conversations(random.Random(0))
    values = [-0.2, 0.4, 0.6, 0.9, -0.3, 1.2]
    row = row_of(right, branches=branch_rows(), turn_advantages=values)
    row["branches"][1]["dialogue"]["role"] = "judge"
    shown = conversation_of(row, [], 2)  # the prompt has a system message and a question
    assert [one.get("role") for one in (shown, *shown["branches"], *shown["items"][0]["branches"])].count("judge") == 1
    assert [branch["prompt_tokens"] for branch in shown["branches"]] == [38]
    assert [branch["prompt_tokens"] for branch in shown["items"][0]["branches"]] == [131]
    assert shown["items"][0]["branches"][0]["items"][0] == {
        "role": "user",
        "text": "Check the product before you go on.",
    }
    inner = shown["items"][0]["branches"][0]
    found = [turn["advantage"] for one in (shown["branches"][0], inner, shown) for turn in one["turns"]]
    assert found == values and shown["samples"] == 3
    rewarded = conversation_of(row | {"turn_rewards": [None, 1.5, 2.5, 3.5, 4.5, 5.5]}, [], 2)
    order = rewarded["branches"][0], rewarded["items"][0]["branches"][0], rewarded
    assert [turn["reward"] for one in order for turn in one["turns"]] == [None, 1.5, 2.5, 3.5, 4.5, 5.5]
    for branch in row["branches"]:
        del branch["shared_messages"], branch["prompt"]
    shown = conversation_of(row, [], 2)  # it is not known where they split
    assert len(shown["branches"]) == 2 and not any("branches" in item for item in shown["items"])


def test_a_long_conversation_loses_its_middle_and_says_how_much():
    messages = [{"role": "assistant" if i % 2 == 0 else "user", "content": str(i)} for i in range(201)]
    dialogue = talk(messages, [Turn(2 * i, 2 * i + 1) for i in range(101)])
    branches = [branch_rows()[0] | {"shared_messages": 100}] * (MAX_BRANCHES + 3)
    shown = conversation_of(row_of(dialogue, branches=branches), [], 1)
    assert len(shown["items"]) == MAX_ITEMS + 1 and len(shown["turns"]) == 101
    assert shown["items"][FIRST_ITEMS] == {"left_out": 201 - MAX_ITEMS, "branches_left_out": MAX_BRANCHES}
    assert shown["more_branches"] == 3 and shown["samples"] == MAX_BRANCHES + 4
    assert (shown["all_turns"], shown["tokens"]) == (101 + 19, 101 + 19 * 9)
    assert shown["items"][-1]["text"] == "200" and shown["items"][-1]["turns"] == [100]


def test_branches_are_in_the_order_in_which_they_began_with_their_seconds():
    def asked(at):
        return talk([{"role": "assistant", "content": str(at)}], timed([Turn(0, 1, generated=1.0)], at))

    dialogue = talk([{"role": "assistant", "content": "all"}], timed([Turn(0, 1, generated=0.5, answered=0.25)], 9.0))
    times = [7.0, *range(MAX_BRANCHES), 2.5]
    branches = [branch_rows()[0] | {"dialogue": asked(at).record()} for at in times]
    shown = conversation_of(row_of(dialogue, branches=branches), [], 1)
    assert [branch["turns"][0]["at"] for branch in shown["branches"]] == sorted(times)[:-2]
    assert [branch["number"] for branch in shown["branches"]] == [*range(1, MAX_BRANCHES + 1)]
    assert shown["turns"][0]["at"] == 9.0 and shown["more_branches"] == 2
    for branch in branches:  # of a run of an older version
        del branch["dialogue"]["turns"][0]["began"]
    shown = conversation_of(row_of(dialogue, branches=branches), [], 1)
    assert [branch["items"][-1]["text"] for branch in shown["branches"]] == [str(at) for at in times[:MAX_BRANCHES]]
    assert not any("at" in turn or "began" in turn for one in (shown, *shown["branches"]) for turn in one["turns"])


def test_a_message_that_a_scheduler_let_the_policy_go_on_with_has_all_its_turns():
    dialogue = talk([{"role": "assistant", "content": "a b"}], [Turn(0, 1), Turn(2, 3)])
    assert conversation_of(row_of(dialogue), [], 1)["items"][0]["turns"] == [0, 1]


@pytest.mark.parametrize(
    "row",
    [
        {"dialogue": {}},
        {"dialogue": {"messages": "x", "turns": 3, "rewards": [1], "ended": 4}},
        {"dialogue": {"messages": [None, 1, {"tool_calls": [1, {"function": 2}]}], "turns": [None, {"start": "a"}]}},
        {"dialogue": {"messages": []}, "branches": [1, {}, {"dialogue": 3, "shared_messages": -5}, {"shared_messages": 1e9}]},
        {"dialogue": {"messages": []}, "branches": 7, "turn_advantages": "x"},
    ],
    ids=str,
)  # fmt: skip
def test_records_of_another_shape_are_shown_as_far_as_they_can_be_read(row):
    assert isinstance(conversation_of(row, [], 1)["items"], list)
    assert conversation_of(row | {"dialogue": None}, [], 1) is None


def test_responses_of_a_group_whose_prompts_differ_show_the_rest_of_theirs_as_context(tmp_path):
    folder = make_conversations(tmp_path / "run", steps=1, groups=1)
    lines = [json.loads(line) for line in (folder / "completions.jsonl").read_text().splitlines()]
    lines[0]["prompt"] += [{"role": "assistant", "content": "earlier"}, {"role": "user", "content": "go on"}]
    (folder / "completions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = read_run(folder)
    group = read_group(run, index_steps(run, [1], 4)[1], 0)
    assert [role for role, _ in group["prompt"]] == ["system", "user"]
    first = [(item["role"], item["text"]) for item in group["responses"][0]["conversation"]["items"][:2]]
    assert first == [("assistant", "earlier"), ("user", "go on")]
    assert "turns" not in group["responses"][0]["conversation"]["items"][0]  # the policy did not write it here
