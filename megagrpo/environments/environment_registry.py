"""Names of the built-in schedulers and tools, and locations of the user's. Imports none of them."""

from __future__ import annotations

from megagrpo.config import MultiTurnSection
from megagrpo.rewards.reward_registry import locate
from megagrpo.rewards.target import Target

SCHEDULERS = {
    "math_tip_trick": "megagrpo.environments.math_tips:math_tip_trick",
    "math_tip_trick_multi_turn": "megagrpo.environments.math_tips:math_tip_trick_multi_turn",
    "reasoning_gym": "megagrpo.environments.gym_attempts:ReasoningGym",
}
TOOLS = {"calculator": "megagrpo.environments.calculator:calculator"}


def targets(section: MultiTurnSection) -> tuple[Target | None, list[Target], Target | None]:
    """Return (scheduler, tools, environment). Raises ProblemError with the key for an unknown name or missing file."""
    scheduler = section.scheduler and locate(section.scheduler, "multi_turn.scheduler", "scheduler", SCHEDULERS)
    tools = [locate(name, f"multi_turn.tools.{i}", "tool", TOOLS) for i, name in enumerate(section.tools)]
    environment = section.environment and locate(section.environment, "multi_turn.environment", "environment", {})
    return scheduler or None, tools, environment or None
