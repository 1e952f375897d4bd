"""reasoning-gym as a scheduler with several attempts per task."""

from __future__ import annotations

from typing import Any

from megagrpo.rewards.functions.gym_score import reasoning_gym

WRONG = "That is not correct. Try again."


class ReasoningGym:
    """A scheduler in which each turn is an attempt at the task. A wrong attempt gets the user message `feedback`.

    The data row's task family scores each attempt. The last attempt, because it is right or no attempt is left, gets
    the reward score x discount^(attempts before it); the others get 0. `extract` has the meaning it has for the reward
    `reasoning_gym`. Raises ValueError for invalid `attempts` or `discount`.
    """

    def __init__(self, attempts: int = 3, discount: float = 1.0, extract: str = "tag", feedback: str = WRONG):
        if attempts < 1 or not 0 <= discount <= 1:
            raise ValueError(
                f"reasoning_gym: attempts {attempts} must be 1 or more and discount {discount} from 0 to 1"
            )
        self.attempts, self.discount, self.extract, self.feedback = attempts, discount, extract, feedback
        self.entry: dict[str, Any] = {}

    def reset(self, question: str, answer: Any, metadata: dict[str, Any]) -> None:
        """Store the row of a reasoning-gym data set. Adds nothing to the prompt."""
        self.entry = {"question": [question], "answer": [answer], "metadata": [metadata]}

    def step(
        self, messages: list[dict[str, Any]], turn: int, turns_left: int | None
    ) -> tuple[list[dict[str, Any]], bool, float]:
        """Score the last message's attempt. Returns messages, whether the conversation ends, and the turn's reward."""
        (score,) = reasoning_gym([messages[-1]["content"]], extract=self.extract, **self.entry)
        if score < 1 and turn < self.attempts and turns_left != 0:
            return [*messages, {"role": "user", "content": self.feedback}], False, 0.0
        return messages, True, score * self.discount ** (turn - 1)
