"""The parallel geometry and the device under it. Importing this package prepares the platform before megatron-core is imported."""

from megagrpo.parallel import device

device.install()
