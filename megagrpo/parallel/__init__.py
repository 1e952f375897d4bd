"""The parallel geometry and the device under it. Importing this package prepares the platform before megatron-core is imported."""

import logging
import warnings

from megagrpo.parallel import device

# megatron-core warns of its own internals on import and in every step; nobody who uses this package can act on it.
warnings.filterwarnings("ignore", module=r"megatron\.")
device.install()


def quiet() -> None:
    """Leave out notices of Megatron, and of torch about the collectives Megatron calls: a person who trains can do nothing about them."""
    logging.getLogger("megatron").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message="`torch.distributed.", category=FutureWarning)
