"""The training loop, how its parts are put together, and what watches it."""
