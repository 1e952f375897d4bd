"""Samples as arrays, and micro-batches that pack them."""
