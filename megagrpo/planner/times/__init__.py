"""Predicted times of a step, and the search over layouts."""
