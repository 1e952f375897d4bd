"""Makes a process use the cuDNN of its Python packages where the system has another one.

torch is compiled against the cuDNN that it installs and refuses an older one. Transformer Engine 2.20 looks for cuDNN
in the system first, as in NVIDIA's CUDA images, and then mixes both.
"""

from __future__ import annotations

import ctypes
import sysconfig
from collections.abc import MutableMapping
from pathlib import Path

SET_BY_USER = "CUDNN_HOME", "CUDNN_PATH"  # Transformer Engine reads them in this order


def load_packaged_cudnn(environment: MutableMapping[str, str], packages: Path | None = None) -> list[str]:
    """Load every library of the package nvidia-cudnn from `packages` (default: this Python's), and name its folder in
    CUDNN_HOME. Return the names of the files; none if the package is missing or the user has named a folder."""
    folder = (packages or Path(sysconfig.get_path("purelib"))) / "nvidia" / "cudnn"
    libraries = sorted((folder / "lib").glob("libcudnn*.so.*"))
    if not libraries or any(environment.get(name, str(folder)) != str(folder) for name in SET_BY_USER):
        return []
    for library in libraries:
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    environment[SET_BY_USER[0]] = str(folder)
    return [library.name for library in libraries]
