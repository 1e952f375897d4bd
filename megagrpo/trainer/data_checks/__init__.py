"""Trials before a run: its data, and its reward functions on gold answers and on wrong ones."""
