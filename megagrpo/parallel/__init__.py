"""The parallel geometry and the device under it. Importing this package prepares the platform before megatron-core is imported."""

import warnings

from megagrpo.parallel import device

# megatron-core warns of its own internals on import and in every step; nobody who uses this package can act on it.
warnings.filterwarnings("ignore", module=r"megatron\.")
device.install()
