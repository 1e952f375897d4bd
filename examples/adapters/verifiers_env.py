"""Environments of Prime Intellect's `verifiers`: SingleTurnEnv, MultiTurnEnv, ToolEnv and StatefulToolEnv.

    multi_turn:
      environment: examples/adapters/verifiers_env.py:Verifiers
      environment_args: {name: ENV_ID}

`ENV_ID` is an installed package of the Environments Hub or a module beside the config. The other arguments go to its
`load_environment`. The policy's turns come from the trainer,
so the environment's own loop (`rollout`) is not used: this class asks `env_response`, stop conditions and the rubric
turn by turn. Needs a version with these classes: verifiers 0.1.9 to 0.2; 0.3 has them in `verifiers.legacy`.

`python examples/adapters/verifiers_env.py ENV_ID [ARGS_AS_JSON] > rows.jsonl` writes its data set.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from megagrpo.environments.episodes.episode import EnvironmentLost

try:
    try:
        import verifiers.legacy as vf
    except ImportError:
        import verifiers as vf
    vf.MultiTurnEnv  # noqa: B018 - a version without these classes raises here
except (ImportError, AttributeError) as error:
    raise ImportError(f"multi_turn.environment: pip install 'verifiers<0.3' ({error})") from error

from verifiers.types import AssistantMessage, ClientConfig, Response, ToolCall, ToolMessage, UserMessage

Message = dict[str, Any]
COLUMNS = ("prompt", "answer", "info", "task", "example_id")
_COUNTER = "call_{}"


class Verifiers:
    """One rollout of an environment of verifiers. The reward is its rubric's."""

    def __init__(self, name: str, **kwargs: Any):
        self._env = vf.load_environment(name, **kwargs)
        if not isinstance(self._env, vf.MultiTurnEnv):
            raise TypeError(f"{name} is a {type(self._env).__name__}; only subclasses of MultiTurnEnv take turns")
        self._state: Any = None
        self._is_clean = False  # whether the rollout's cleanup has begun

    def list_tools(self) -> list[dict[str, Any]]:
        """Return the schemas of a ToolEnv's tools, in OpenAI's format."""
        tools = self._env.tool_defs or []
        keys = ("name", "description", "parameters")
        return [{"type": "function", "function": {key: getattr(tool, key) for key in keys}} for tool in tools]

    async def reset(self, prompt: Any, **columns: Any) -> None:
        """Begin a rollout of a row of the environment's data set."""
        await self._clean_up()
        row = {"prompt": prompt} | {name: columns[name] for name in COLUMNS if name in columns}
        policy = ClientConfig(api_base_url="http://policy.invalid", api_key_var="MEGAGRPO_HAS_NO_KEY")
        self._state, self._is_clean = await self._env.init_state(row, policy, "policy"), False
        self._state = await self._env.setup_state(self._state) or self._state

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> str:
        """Run one call. Its result is the message of the environment, which formats errors itself."""
        call = ToolCall(id=_COUNTER.format(0), name=name, arguments=json.dumps(arguments))
        before = self._state["prompt"] if not self._state["trajectory"] else self._state["trajectory"][-1]["prompt"]
        message = AssistantMessage(content="", tool_calls=[call])
        answers = await self._env.env_response([*before, message], self._state)
        return "\n".join(_text(answer) for answer in answers)

    async def step(self, messages: list[Message], prompt_messages: int) -> tuple[list[Message], bool]:
        """Ask the environment about the last turn. Returns messages with its response, and whether it has ended."""
        self._record(messages, prompt_messages)
        if not await self._env.is_completed(self._state):
            history = [*self._state["trajectory"][-1]["prompt"], *self._state["trajectory"][-1]["completion"]]
            answers = await self._env.env_response(history, self._state)
            messages = [*messages, *({"role": _get(a, "role"), "content": _text(a)} for a in answers)]
            if self._state.get("final_env_response") is None:
                return messages, False
        return messages, True

    async def get_reward(self, messages: list[Message], prompt_messages: int) -> float:
        """Score the whole conversation with the rubric."""
        self._record(messages, prompt_messages)
        await self._clean_up()
        await self._env.rubric.score_rollout(self._state)
        return float(self._state["reward"])

    async def close(self) -> None:
        """Clean up a rollout that has no reward yet, and tear the environment down."""
        await self._clean_up()
        await self._env._teardown()

    async def _clean_up(self) -> None:
        """Clean up the rollout, once. One that has failed begins its cleanup here too."""
        if self._state is not None and not self._is_clean:
            self._is_clean = True
            await self._env.cleanup(self._state)

    def _record(self, messages: list[Message], prompt_messages: int) -> None:
        """Write the conversation into the state, a step of the trajectory per turn of the policy."""
        if self._state is None:
            raise EnvironmentLost("the rollout has not begun")
        self._state["trajectory"] = []
        typed = _typed(messages)
        for i in range(prompt_messages, len(typed)):
            if isinstance(typed[i], AssistantMessage):
                step: dict[str, Any] = {
                    "prompt": typed[:i],
                    "completion": [typed[i]],
                    "tokens": None,
                    "reward": None,
                    "advantage": None,
                }
                step |= {"response": _response(typed[i]), "is_truncated": False, "extras": {}}
                self._state["trajectory"].append(step | {"trajectory_id": self._state["trajectory_id"]})


def _typed(messages: list[Message]) -> list[Any]:
    """Return verifiers' messages. Calls get ids in order, and results the ids of the calls before them."""
    typed: list[Any] = []
    open_ids: list[str] = []
    for i, message in enumerate(messages):
        content = message.get("content") or ""
        match message["role"]:
            case "assistant":
                named = [call["function"] for call in message.get("tool_calls") or []]
                open_ids = [_COUNTER.format(f"{i}_{j}") for j in range(len(named))]
                calls = [
                    ToolCall(id=identity, name=call["name"], arguments=json.dumps(call["arguments"]))
                    for identity, call in zip(open_ids, named, strict=True)
                ]
                typed.append(AssistantMessage(content=content, tool_calls=calls or None))
            case "tool":
                typed.append(ToolMessage(content=content, tool_call_id=open_ids.pop(0) if open_ids else "none"))
            case "system":
                typed.append(vf.SystemMessage(content=content))
            case _:
                typed.append(UserMessage(content=content))
    return typed


def _response(message: Any) -> Any:
    fields = message.model_dump() | {"finish_reason": "stop", "is_truncated": False}
    return Response(id="policy", created=0, model="policy", message=fields)


def _get(message: Any, name: str) -> Any:
    return message.get(name) if isinstance(message, dict) else getattr(message, name)


def _text(message: Any) -> str:
    content = _get(message, "content")
    return content if isinstance(content, str) else "".join(_get(part, "text") or "" for part in content)


def main() -> None:
    """Write the rows of an environment's data set as JSON lines."""
    name, *arguments = sys.argv[1:]
    for row in vf.load_environment(name, **(json.loads(arguments[0]) if arguments else {})).get_dataset():
        print(json.dumps({key: row[key] for key in COLUMNS if key in row}, default=str))


if __name__ == "__main__":
    main()
