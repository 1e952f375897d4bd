"""Evaluation of held-out sets."""
