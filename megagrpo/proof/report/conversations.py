"""Conversations as the page shows them: turns, tool calls with their results, and the branches of a trajectory.

A conversation has `items` in order: messages, with the turns and tool calls of the policy's own. An item has the
`branches` that leave the trajectory after it, in the order in which they began. Long conversations lose their middle,
long texts too, and trajectories with many branches the last ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from megagrpo.platform.process.terminal import printable
from megagrpo.proof.report.collect import Row
from megagrpo.proof.report.reduce import number
from megagrpo.proof.report.shown_texts import text_of

MAX_ITEMS = 48  # of one conversation
FIRST_ITEMS = 32  # of these
MAX_BRANCHES = 16  # of one trajectory
MAX_CALL_CHARACTERS = 1000  # of the arguments of a call, and of its result

Item = dict[str, Any]
Conversation = dict[str, Any]


def conversation_of(row: Row, context: Sequence[Any], num_prompt: int) -> Conversation | None:
    """Return the conversation of a line of `completions.jsonl`; None if its response has one turn.

    `context` are the messages of the line's prompt after the `num_prompt` messages that the page shows above.
    """
    branches = row.get("branches")
    branches = [branch for branch in branches if isinstance(branch, dict)] if isinstance(branches, list) else []
    if not isinstance(row.get("dialogue"), dict):
        return None
    of_turns = OfTurns(iter(_list(row.get("turn_advantages"))), iter(_list(row.get("turn_rewards"))))
    shown = [_branch(branch, of_turns) for branch in branches]
    whole, items_before = _conversation(row, context, of_turns)
    turns = [turn for sample in (whole, *shown) for turn in sample["turns"]]
    sums = {name: sum(turn[name] for turn in turns) for name in ("tokens", "after")}
    whole |= {"samples": 1 + len(shown), "all_turns": len(turns), **sums}
    _time([whole, *shown])
    in_order = sorted(zip(branches, shown, strict=True), key=lambda pair: _began(pair[1]))  # stable
    if len(in_order) > MAX_BRANCHES:
        whole["more_branches"] = len(in_order) - MAX_BRANCHES
    for place, (branch, found) in enumerate(in_order[:MAX_BRANCHES], 1):
        found["number"] = place
        split = number(branch.get("shared_messages"))
        split = 0 if split is None else min(max(0, int(split) - num_prompt), len(items_before) - 1)
        before = items_before[split]
        (whole["items"][before - 1] if before else whole).setdefault("branches", []).append(found)
    return _shortened(whole)


class OfTurns(NamedTuple):
    """What a line of `completions.jsonl` has for each turn of a trajectory: of its branches, then of the response."""

    advantages: Iterator[Any]
    rewards: Iterator[Any]  # with those of functions per turn; empty: each turn has its own


def _time(samples: Sequence[Conversation]) -> None:
    """Give each turn `at`, its seconds after the first one of all samples, if all turns have recorded when they
    began."""
    turns = [turn for sample in samples for turn in sample["turns"]]
    times = [turn.pop("began") for turn in turns]
    if times and all(times):
        for turn, began in zip(turns, times, strict=True):
            turn["at"] = round(began - min(times), 3)


def _began(sample: Conversation) -> float:
    return min((turn.get("at", 0.0) for turn in sample["turns"]), default=0.0)


def _branch(row: Row, of_turns: OfTurns) -> Conversation:
    context = row.get("prompt")
    shown, _ = _conversation(row, context if isinstance(context, list) else [], of_turns)
    return _shortened(shown | {"prompt_tokens": number(row.get("prompt_tokens"))})


def _conversation(row: Row, context: Sequence[Any], of_turns: OfTurns) -> tuple[Conversation, list[int]]:
    """Return the conversation, and how many items it has before each of its messages and after the last one."""
    dialogue = row["dialogue"] if isinstance(row.get("dialogue"), dict) else {}
    turns = [turn for turn in _list(dialogue.get("turns")) if isinstance(turn, dict)]
    rewards = dialogue.get("rewards")
    if not dialogue:
        next(of_turns.rewards, None)  # a sample without a dialogue is one turn
    messages = [*context, *_list(dialogue.get("messages"))]
    items, items_before = _items(messages, len(context), len(turns))
    return {
        "items": items,
        "turns": [_turn(turn, following, of_turns) for turn, following in _pairs(turns)],
        "ended": text_of(dialogue.get("ended")),
        **({"role": printable(str(role))} if (role := dialogue.get("role")) else {}),
        "cause": text_of(dialogue.get("cause")),
        "retries": number(dialogue.get("retries")) or 0,
        "rewards": {printable(str(name)): number(value) for name, value in rewards.items()}
        if isinstance(rewards, dict)
        else {},
    }, items_before


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _pairs(turns: Sequence[Row]) -> Iterator[tuple[Row, Row | None]]:
    """Yield each turn with the turn after it."""
    return zip(turns, [*turns[1:], None], strict=True) if turns else iter(())


def _turn(turn: Row, following: Row | None, of_turns: OfTurns) -> dict[str, Any]:
    """Return a turn's first token, tokens, and those of others after it; its seconds, reward and advantage."""
    start, stop = (number(turn.get(name)) or 0 for name in ("start", "stop"))
    after = 0 if following is None else max(0, (number(following.get("start")) or 0) - stop)
    names = "generated", "queued", "answered", "failures", "shortened"
    began = turn.get("began")
    return {
        "began": began if number(began) else 0.0,
        "start": start,
        "tokens": max(0, stop - start),
        "after": after,
        "cut": turn.get("finish_reason") == "length",
        "advantage": number(next(of_turns.advantages, None)),
        "reward": number(next(of_turns.rewards, turn.get("reward"))),
        **{name: number(turn.get(name)) for name in names},
    }


def _items(messages: Sequence[Any], num_context: int, num_turns: int) -> tuple[list[Item], list[int]]:
    """Return the messages as items, of which the first `num_context` are not the policy's, and how many items are
    before each message and after the last one. The result of a tool call is part of the item of the call."""
    items: list[Item] = []
    before, turn, open_calls = [], 0, list[Item]()
    for index, message in enumerate(messages):
        before.append(len(items))
        message = message if isinstance(message, dict) else {"content": message}
        role = text_of(message.get("role", ""))
        if role == "tool" and (call := _answered(open_calls, message)) is not None:
            open_calls.remove(call)
            call["result"] = text_of(message.get("content"), MAX_CALL_CHARACTERS)
            call["failed"] = call["result"].startswith('{"error"')
            continue
        item: Item = {"role": role, "text": text_of(message.get("content"))}
        if calls := [_call(call) for call in _list(message.get("tool_calls")) if isinstance(call, dict)]:
            item["calls"] = calls
        open_calls = [*calls]
        if role == "assistant" and index >= num_context and turn < num_turns:
            item["turns"] = [turn]
            turn += 1
        items.append(item)
    own = next((item for item in reversed(items) if "turns" in item), None)
    if own is not None:  # a scheduler let the policy go on with a message
        own["turns"] += range(turn, num_turns)
    for item in items:
        for call in item.get("calls", ()):
            call.pop("id", None)
    return items, [*before, len(items)]


def _call(call: Row) -> Item:
    function = call.get("function")
    function = function if isinstance(function, dict) else {}
    arguments = text_of(_arguments(function.get("arguments")), MAX_CALL_CHARACTERS)
    return {"id": call.get("id"), "name": text_of(function.get("name")), "arguments": arguments}


def _arguments(value: Any) -> Any:
    """Return arguments, which OpenAI's clients send as JSON text, as in a call of a function; other values as they
    are."""
    try:
        named = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value
    if not isinstance(named, dict):
        return value
    return ", ".join(f"{name}: {json.dumps(one, ensure_ascii=False)}" for name, one in named.items())


def _answered(open_calls: Sequence[Item], message: Row) -> Item | None:
    """Return the call whose result a tool message is: by its id, else the next one by name, else the next one."""
    if (call_id := message.get("tool_call_id")) is not None:
        return next((call for call in open_calls if call["id"] == call_id), None)
    named = [call for call in open_calls if message.get("name") in (None, call["name"])]
    return named[0] if named else None


def _shortened(conversation: Conversation) -> Conversation:
    """Leave out items from the middle of a long conversation."""
    items = conversation["items"]
    if len(items) > MAX_ITEMS:
        last = MAX_ITEMS - FIRST_ITEMS
        branches = sum(len(item.get("branches", ())) for item in items[FIRST_ITEMS:-last])
        left_out = {"left_out": len(items) - MAX_ITEMS, "branches_left_out": branches}
        conversation["items"] = [*items[:FIRST_ITEMS], left_out, *items[-last:]]
    return conversation
