"""Weights between Hugging Face and Megatron: slices, files, blocks, conversion, precisions and the hub."""
