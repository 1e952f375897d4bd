"""Names of the built-in schedulers, tools and adapters, and locations of the user's. Imports none of them."""

from __future__ import annotations

from megagrpo.config import MultiTurnSection, Problem, ProblemError
from megagrpo.rewards.registry.reward_registry import locate
from megagrpo.rewards.registry.target import Target

SCHEDULERS = {
    "math_tip_trick": "megagrpo.environments.math_tips:math_tip_trick",
    "math_tip_trick_multi_turn": "megagrpo.environments.math_tips:math_tip_trick_multi_turn",
    "reasoning_gym": "megagrpo.environments.gym_attempts:ReasoningGym",
}
TOOLS = {"calculator": "megagrpo.environments.calculator:calculator"}
_ADAPTERS = "megagrpo.environments.adapters."
# Prefix of a name -> the class whose constructor gets the rest of the name as `name`.
ENVIRONMENT_ADAPTERS = {
    "mcp:": _ADAPTERS + "mcp_server:McpServer",
}
TOOL_ADAPTERS = {"mcp:": _ADAPTERS + "mcp_server:McpServer"}
# Prefix of a name -> the class of the repository that a config names by its file.
EXAMPLES = {
    "gymnasium": "configs/examples/frozen_lake/gymnasium_env.py:Gymnasium",
    "harbor": "examples/adapters/harbor_env.py:Harbor",
    "nemo_gym": "examples/adapters/nemo_gym.py:NemoGym",
    "openenv": "examples/adapters/openenv_client.py:OpenEnv",
    "sandbox_fusion": "examples/adapters/sandbox_fusion.py:SandboxFusion",
    "verifiers": "examples/adapters/verifiers_env.py:Verifiers",
    "verifiers_v1": "examples/adapters/verifiers_v1.py:VerifiersV1",
}


def targets(section: MultiTurnSection) -> tuple[Target | None, list[Target], Target | None]:
    """Return (scheduler, tools, environment). Raises ProblemError with the key for an unknown name or missing file."""
    scheduler = section.scheduler and locate(section.scheduler, "multi_turn.scheduler", "scheduler", SCHEDULERS)
    tools = [locate_tool(name, f"multi_turn.tools.{i}") for i, name in enumerate(section.tools)]
    environment = section.environment and locate_environment(section.environment, "multi_turn.environment")
    return scheduler or None, tools, environment or None


def locate_tool(name: str, key: str) -> Target:
    """Return the location of the tool at `key`, or of the adapter whose prefix it has. Raises as `targets`."""
    return _adapted(name, key, TOOL_ADAPTERS) or locate(name, key, "tool", TOOLS, _own(TOOL_ADAPTERS))


def locate_environment(name: str, key: str) -> Target:
    """Return the location of an environment's class, or of the adapter whose prefix it has. Raises as `targets`."""
    return _adapted(name, key, ENVIRONMENT_ADAPTERS) or locate(name, key, "environment", {}, _own(ENVIRONMENT_ADAPTERS))


def _adapted(name: str, key: str, adapters: dict[str, str]) -> Target | None:
    prefix, _, rest = name.partition(":")
    if prefix in EXAMPLES:
        text = f"`{name}`: the adapter is a file of the repository; name it as {EXAMPLES[prefix]}"
        raise ProblemError(Problem((key,), f"{text} (docs/environments.md)"))
    location, _, attribute = adapters.get(f"{prefix}:", "").partition(":")
    return Target(location, attribute, preset=(("name", rest.strip()),)) if location and rest.strip() else None


def _own(adapters: dict[str, str]) -> str:
    return f"package.module:name, path/file.py:name, or one of {', '.join(f'{prefix}NAME' for prefix in adapters)}"
