"""Megatron parameters as blocks of Hugging Face tensors. Importing this
package prepares the device before megatron is imported."""

import megagrpo.platform.device  # noqa: F401
