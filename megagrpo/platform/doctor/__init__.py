"""Checks a machine before the first run: driver, GPUs, links, packages, limits, memory and environment variables. Needs
no torch."""
