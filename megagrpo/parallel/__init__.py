"""The parallel geometry. Importing this package prepares the platform before megatron-core is imported."""

import megagrpo.device  # noqa: F401  (prepares the platform before megatron is imported)
