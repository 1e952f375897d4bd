"""Adapters, and the quantized base below them."""
