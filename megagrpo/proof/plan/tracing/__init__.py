"""Runs the trainer's real code on tensors without data, and counts its GPU work. Imports torch and megatron-core."""
