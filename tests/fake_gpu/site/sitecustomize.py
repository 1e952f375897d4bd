"""Python runs this file first in each process on fake GPUs: as soon as the process has imported torch, it computes by
kernels.py and exports memory by ipc.py.

Transformer Engine is hidden unless MEGAGRPO_FAKE_GPU_TE is set, because only test_te.py replaces its kernels.

The preloaded runtime does not read CUDA_VISIBLE_DEVICES. Its number of entries becomes the number of GPUs here. With no
entry the process starts again without the runtime.
"""

import importlib.abc
import importlib.util
import os
import sys

visible = os.environ.get("CUDA_VISIBLE_DEVICES")
if visible is not None:
    os.environ["FAKEGPU_DEVICE_COUNT"] = str(len([entry for entry in visible.split(",") if entry]))
if visible == "" and "LD_PRELOAD" in os.environ:
    del os.environ["LD_PRELOAD"]
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


class KernelsAfterTorch(importlib.abc.MetaPathFinder):
    """Finds torch as usual, and replaces its kernels once it is imported."""

    def find_spec(self, name, path=None, target=None):
        """Return torch's own spec, with a loader that then replaces the kernels; None for all other modules."""
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_replace(module):
            execute(module)
            if module.cuda.is_available():
                from tests.fake_gpu import ipc, kernels

                kernels.replace_everywhere()
                ipc.share_between_processes()

        spec.loader.exec_module = execute_and_replace
        return spec


if "MEGAGRPO_FAKE_GPU_TE" not in os.environ:
    sys.modules["transformer_engine"] = None  # looks like a package that is not installed
sys.meta_path.insert(0, KernelsAfterTorch())
