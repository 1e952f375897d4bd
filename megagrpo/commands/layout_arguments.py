"""Provides the converters' command-line options for a parallel layout, and prints user errors as one line with exit code 2.

The converters run on the CPU, also on machines with GPUs: they compute nothing, and the CPU's layer spec needs no memory for its
structure. Importing this file hides the GPUs from torch, so import it first.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable

os.environ["CUDA_VISIBLE_DEVICES"] = ""

from megagrpo.config import ParallelSection
from megagrpo.parallel.agree import RankError
from megagrpo.parallel.layout import Layout, init_layout


def add_layout_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --tp, --pp, --vpp, --pipeline-layers, --ep and --etp. tp x pp and ep x etp x pp must divide the number of ranks, which
    megagrpo launch sets (1 without it)."""
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel size (default 1)")
    parser.add_argument("--pp", type=int, default=1, help="pipeline-parallel size (default 1)")
    parser.add_argument("--vpp", type=int, default=1, help="virtual pipeline stages on each rank (default 1)")
    parser.add_argument("--pipeline-layers", type=int, nargs="+", help="layers of each pipeline stage, pp x vpp numbers (default: even)")
    parser.add_argument("--ep", type=int, default=1, help="expert-parallel size (default 1)")
    parser.add_argument("--etp", type=int, help="tensor-parallel size inside each expert (default tp)")


def run_in_layout(args: argparse.Namespace, action: Callable[[Layout], None]) -> int:
    """Run `action` in the layout. Returns exit code 0, or 2 after a user error."""
    layout = None
    try:
        stages = args.pp * args.vpp
        if args.pipeline_layers and len(args.pipeline_layers) != stages:
            raise ValueError(f"--pipeline-layers: {len(args.pipeline_layers)} number(s) for {stages} stages; give one number per stage")
        sizes = dict(tp=args.tp, pp=args.pp, vpp=args.vpp, pipeline_layers=args.pipeline_layers, ep=args.ep, etp=args.etp)
        layout = init_layout(ParallelSection(**sizes))
        action(layout)
    except (ValueError, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    except RankError:  # the rank that failed prints the error
        return 2
    finally:
        if layout is not None:
            layout.close()
    return 0
