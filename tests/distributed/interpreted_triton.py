"""Triton's interpreter for one rank of a test. The interpreter must be selected before Triton is imported, and
megatron-core imports Triton. So this module imports Triton a second time, in a rank that no other test uses."""

import os
import sys
from dataclasses import replace

from megagrpo.policy.lm_head import fused_logprobs
from megagrpo.policy.lm_head.fp8 import FP8_BLOCK
from megagrpo.policy.lm_head.fused_logprobs import Tiles

SMALL = Tiles(tokens=16, vocab=32, hidden=16)


def interpret(tiles: Tiles = SMALL, scratch: int = 2**12) -> None:
    """Use interpreted fused kernels in this rank, with small tiles and little scratch memory. Triton's compiled part
    stays, because it cannot be loaded twice."""
    os.environ["TRITON_INTERPRET"] = "1"
    for name in [n for n in sys.modules if n.split(".")[0] == "triton" and not n.startswith("triton._C")]:
        del sys.modules[name]
    sys.modules.pop("megagrpo.policy.lm_head.fused_logprobs_kernels", None)
    fused_logprobs.TILES, fused_logprobs.FP8_TILES, fused_logprobs.SCRATCH_BYTES = (
        tiles,
        replace(tiles, hidden=FP8_BLOCK),
        scratch,
    )
