"""The built-in reward functions."""
