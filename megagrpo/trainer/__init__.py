"""The training loop, the construction of its parts, and the checks that stop a run."""
