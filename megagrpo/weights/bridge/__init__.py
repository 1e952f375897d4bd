"""Weights and checkpoints between Megatron and Hugging Face: load, export, convert, and the distributed format.
Importing this package prepares the device before megatron is imported."""

import megagrpo.platform.device  # noqa: F401
