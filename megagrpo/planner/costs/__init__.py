"""Sizes, operations and memory of a model, without times."""
