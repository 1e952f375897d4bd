"""Gymnasium's environments as text: observations are written for the policy, and its answer is read as an action.

    multi_turn:
      environment: gymnasium_env.py:Gymnasium
      environment_args: {name: ENV_ID}

The column `seed` (optional) of a row is the seed of `reset`, so that all responses to a prompt meet the same game.
API: https://gymnasium.farama.org/api/env/
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from megagrpo.environments.episodes.episode import INVALID_ACTION
from megagrpo.platform.process.user_code import load_named

try:
    import gymnasium
except ImportError as error:
    raise ImportError("multi_turn.environment: pip install gymnasium") from error

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")
_HIGHLIGHT = re.compile(r"\x1b\[4\dm(.*?)\x1b\[0m")  # text on a colored background, such as the player
_COLOR = re.compile(r"\x1b\[[\d;]*m")


class Gymnasium:
    """One environment of Gymnasium. Each turn of the policy is an action; the step's reward is the turn's reward.

    Constructor arguments (`multi_turn.environment_args`): `actions` names the actions of a Discrete space in order, and
    the last of the names in an answer counts. Without names the last number counts, and in a Box space the last
    numbers, as many as it has. A Text space gets the whole answer. `show` is `render` for the text of
    `render_mode="ansi"`, `observation`, or `file.py:function`, which gets the observation and returns text. `invalid`
    is the reward of an answer without an action; the game does not move. Further arguments go to `gymnasium.make`.
    """

    def __init__(
        self,
        name: str,
        actions: list[str] | None = None,
        show: str = "observation",
        invalid: float = 0.0,
        **kwargs: Any,
    ):
        self._show: Callable[[Any], Any] = str
        if show == "render":
            self._show = self._drawn
        elif show != "observation":
            self._show = load_named(show)
        self._env = gymnasium.make(name, **({"render_mode": "ansi"} if show == "render" else {}), **kwargs)
        self._names, self._invalid = actions, invalid
        count = getattr(self._env.action_space, "n", None)
        if actions is not None and count != len(actions):
            raise ValueError(f"{name} has {count} actions, but environment_args.actions names {len(actions)}")

    def reset(self, seed: int | None = None) -> str:
        """Begin a game. Returns the first observation, for the end of the prompt."""
        observation, _ = self._env.reset(seed=None if seed is None else int(seed))
        return "\n" + str(self._show(observation))

    def step(self, messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], bool, float]:
        """Take the action of the last message. Returns messages with the next observation, the end, and the reward."""
        action = self._action(messages[-1]["content"])
        if action is None:
            return [*messages, {"role": "user", "content": INVALID_ACTION}], False, self._invalid
        observation, reward, terminated, truncated, _ = self._env.step(action)
        answer = {"role": "user", "content": str(self._show(observation))}
        return [*messages, answer], bool(terminated or truncated), float(reward)

    def close(self) -> None:
        """Close the game: its windows, sockets and processes."""
        self._env.close()

    def _drawn(self, _: Any) -> str:
        return _COLOR.sub("", _HIGHLIGHT.sub(r"[\1]", str(self._env.render()))).strip("\n")

    def _action(self, text: str) -> Any:
        """Return the action that `text` names, or None."""
        space = self._env.action_space
        if isinstance(space, gymnasium.spaces.Text):
            return text if text in space else None
        if self._names is not None:
            found = [(text.lower().rfind(name.lower()), len(name), i) for i, name in enumerate(self._names)]
            position, _, index = max(found)
            return None if position < 0 else index + int(space.start)
        numbers = [float(number) for number in _NUMBER.findall(text)]
        if isinstance(space, gymnasium.spaces.Discrete):
            return int(numbers[-1]) if numbers and numbers[-1].is_integer() and int(numbers[-1]) in space else None
        if not isinstance(space, gymnasium.spaces.Box):
            raise TypeError(f"the action space {space} has no text; use Discrete, Box or Text, or write an environment")
        count = int(space.low.size)
        if len(numbers) < count:
            return None
        action = space.low.copy()
        action.flat = numbers[-count:]
        return action.clip(space.low, space.high)
