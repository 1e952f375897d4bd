"""Commands before the first run."""
