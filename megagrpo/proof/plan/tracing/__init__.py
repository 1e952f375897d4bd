"""Runs the trainer's real code on tensors without data, and counts what it would do on a GPU. Imports torch and
megatron-core."""
