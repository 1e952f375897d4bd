"""Built-in schedulers and tools by name, and where those of the user are. Imports nothing of them."""

from __future__ import annotations

from megagrpo.config import MultiTurnSection
from megagrpo.rewards.registry import locate
from megagrpo.rewards.target import Target

SCHEDULERS = {
    "math_tip_trick": "megagrpo.multi_turn.math_tips:math_tip_trick",
    "math_tip_trick_multi_turn": "megagrpo.multi_turn.math_tips:math_tip_trick_multi_turn",
    "reasoning_gym": "megagrpo.multi_turn.gym_attempts:ReasoningGym",
}
TOOLS = {"calculator": "megagrpo.multi_turn.calculator:calculator"}


def targets(section: MultiTurnSection) -> tuple[Target | None, list[Target], Target | None]:
    """(scheduler, tools, environment). ProblemError, with the key, for an unknown name and a missing file."""
    scheduler = section.scheduler and locate(section.scheduler, "multi_turn.scheduler", "scheduler", SCHEDULERS)
    tools = [locate(name, f"multi_turn.tools.{i}", "tool", TOOLS) for i, name in enumerate(section.tools)]
    environment = section.environment and locate(section.environment, "multi_turn.environment", "environment", {})
    return scheduler or None, tools, environment or None
