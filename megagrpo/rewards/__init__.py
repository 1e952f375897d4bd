"""Reward functions, each run in a killable worker process with a deadline. Importing this package imports no other."""
