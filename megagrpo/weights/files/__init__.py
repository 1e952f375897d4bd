"""Files of tensors: checksums, partial files, Megatron's distributed format and GPTModel's checkpoints. Importing this
package prepares the device before megatron is imported."""

import megagrpo.platform.device  # noqa: F401
