"""The model that is trained: construction, forward and backward, optimizer, LoRA, FP8 and the reference. Importing this
package prepares the device before megatron is imported."""

import megagrpo.platform.device  # noqa: F401
