"""The names of reward functions and the values that they return."""
