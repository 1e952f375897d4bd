"""The options of the converters for a parallel layout, and how the converters run in it: on the CPU, with user errors
as one line.

The converters compute nothing, and the CPU's layer spec needs no memory for its structure. So they leave GPUs alone.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from megagrpo.platform.process.imports import without_garbage_collection
from megagrpo.platform.process.terminal import warn

if TYPE_CHECKING:
    from megagrpo.platform.parallel.layout import Layout


def add_layout_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --tp, --pp, --vpp, --pipeline-layers, --ep and --etp. tp x pp and ep x etp x pp must divide the number of
    ranks, which megagrpo launch sets (1 without it)."""
    add = parser.add_argument
    add("--tp", type=int, default=1, metavar="N", help="tensor-parallel size (default 1)")
    add("--pp", type=int, default=1, metavar="N", help="pipeline-parallel size (default 1)")
    add("--vpp", type=int, default=1, metavar="N", help="virtual pipeline stages on each rank (default 1)")
    add(
        "--pipeline-layers",
        type=int,
        nargs="+",
        metavar="N",
        help="layers of each pipeline stage, pp x vpp numbers (default: even)",
    )
    add("--ep", type=int, default=1, metavar="N", help="expert-parallel size (default 1)")
    add("--etp", type=int, metavar="N", help="tensor-parallel size inside each expert (default tp)")


def hide_gpus() -> None:
    """Hide all GPUs from torch in this process. Call it before torch is imported."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def run_in_layout(options: argparse.Namespace, action: Callable[[Layout], None]) -> int:
    """Run `action` in the layout, on the CPU. Returns exit code 0, or 2 after a user error."""
    hide_gpus()
    with without_garbage_collection():
        from megagrpo.config import ParallelSection
        from megagrpo.platform.parallel.agree import RankError
        from megagrpo.platform.parallel.layout import init_layout

    layout = None
    try:
        stages = options.pp * options.vpp
        layers = options.pipeline_layers
        if layers and len(layers) != stages:
            raise ValueError(
                f"--pipeline-layers: {len(layers)} number(s) for {stages} stages; give one number per stage"
            )
        sizes = dict(
            tp=options.tp, pp=options.pp, vpp=options.vpp, pipeline_layers=layers, ep=options.ep, etp=options.etp
        )
        layout = init_layout(ParallelSection(**sizes))
        action(layout)
    except (ValueError, OSError) as error:
        warn(f"error: {error}")
        return 2
    except RankError:  # the rank that failed prints the error
        return 2
    finally:
        if layout is not None:
            layout.close()
    return 0
