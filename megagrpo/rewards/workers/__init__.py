"""Killable worker processes with deadlines, which run reward functions, tools and schedulers."""
