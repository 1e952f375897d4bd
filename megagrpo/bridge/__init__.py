"""Weights and checkpoints between Megatron and Hugging Face: load, export, convert, and the distributed format. Importing this package
prepares the device before megatron is imported."""

import megagrpo.device  # noqa: F401
