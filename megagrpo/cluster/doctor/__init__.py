"""Checks a machine before a first run: driver, GPUs, links, packages, limits, memory, environment. Needs no torch."""
