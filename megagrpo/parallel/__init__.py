"""The parallel geometry. Importing this package prepares the device before megatron is imported."""

import megagrpo.device  # noqa: F401
