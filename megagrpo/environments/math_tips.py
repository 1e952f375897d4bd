"""Schedulers of ms-swift's first GRPO release, which report a wrong answer once. They run in workers' main threads."""

from __future__ import annotations

from typing import Any

from megagrpo.rewards.functions.math_accuracy import accuracy

DOUBT = "But wait... It seems I made a mistake,"
VERDICT = "The answer is not correct, It seems You made a mistake, you need to recheck very carefully."
Message = dict[str, Any]


def math_tip_trick(messages: list[Message], solution: Any = None, answer: Any = None) -> tuple[list[Message], bool]:
    """Let the policy continue a wrong answer once, with a doubt in its own voice: the message is cut at the first
    <answer> or </think>, and `DOUBT` is appended. The gold answer is the column `solution`, or else `answer`."""
    content = messages[-1]["content"]
    if _is_right(content, solution, answer) or DOUBT in content:
        return messages, True
    for tag in ("<answer>", "</think>"):
        content = content.partition(tag)[0]
    return [*messages[:-1], messages[-1] | {"content": content + DOUBT}], False


def math_tip_trick_multi_turn(
    messages: list[Message], solution: Any = None, answer: Any = None
) -> tuple[list[Message], bool]:
    """Report a wrong solution once in a user message. The gold answer is the column `solution`, or else `answer`."""
    if _is_right(messages[-1]["content"], solution, answer) or VERDICT in messages[-2]["content"]:
        return messages, True
    return [*messages, {"role": "user", "content": VERDICT}], False


def _is_right(content: str, solution: Any, answer: Any) -> bool:
    """Whether `accuracy` finds the gold answer in the text; also True when the gold is empty. Raises ValueError without
    both columns."""
    if solution is None and answer is None:
        raise ValueError("the data set has neither a column `solution` nor `answer`; rename one with data.columns")
    (accuracy_reward,) = accuracy([content], solution=[solution] if solution is not None else None, answer=[answer])
    return accuracy_reward is None or accuracy_reward >= 1
