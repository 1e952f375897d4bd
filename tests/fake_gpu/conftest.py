"""Hides Transformer Engine from these tests, whose steps on the CPU it would change. `test_te.py` shows it to its
ranks."""

import os
import sys

if os.environ.get("MEGAGRPO_FAKE_GPU"):
    sys.modules["transformer_engine"] = None  # looks like a package that is not installed
