"""Prompts from data sets, tokenizers, and the packing of samples into micro-batches."""
