"""Checkpoints of a run, its files and the lock on its folder."""
