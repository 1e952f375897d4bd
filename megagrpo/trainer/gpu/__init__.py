"""Sharing of GPUs between the trainer and colocated servers."""
