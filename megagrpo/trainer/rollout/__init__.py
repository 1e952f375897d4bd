"""Prompts, rollouts and groups of a step, and their exchange among ranks."""
