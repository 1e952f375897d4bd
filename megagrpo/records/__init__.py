"""The output of a run: metrics, console, step dumps, checkpoints and the lock on its folder."""
