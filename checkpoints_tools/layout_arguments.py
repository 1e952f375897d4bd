"""What the converters share: the parallel layout from the command line, and errors of the user as one line and exit code 2.

They work on the CPU, on machines with GPUs too: nothing is computed, and there every layer is one whose structure needs no memory.
Importing this file hides the GPUs, before torch looks for them.
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
    """--tp, --pp, --vpp, --pipeline-layers, --ep and --etp; tp x pp and ep x etp x pp must divide the ranks that launch/ranks.py starts,
    1 without it."""
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel size (default 1)")
    parser.add_argument("--pp", type=int, default=1, help="pipeline-parallel size (default 1)")
    parser.add_argument("--vpp", type=int, default=1, help="virtual pipeline stages on each rank (default 1)")
    parser.add_argument("--pipeline-layers", type=int, nargs="+", help="layers of each pipeline stage, pp x vpp numbers (default: even)")
    parser.add_argument("--ep", type=int, default=1, help="expert-parallel size (default 1)")
    parser.add_argument("--etp", type=int, help="tensor-parallel size inside each expert (default tp)")


def run_in_layout(args: argparse.Namespace, action: Callable[[Layout], None]) -> int:
    """Run `action` in the layout; 0, or 2 after an error that the user can mend."""
    layout = None
    try:
        stages = args.pp * args.vpp
        if args.pipeline_layers and len(args.pipeline_layers) != stages:
            raise ValueError(f"--pipeline-layers: {len(args.pipeline_layers)} number(s) for {stages} stages; give one for each")
        sizes = dict(tp=args.tp, pp=args.pp, vpp=args.vpp, pipeline_layers=args.pipeline_layers, ep=args.ep, etp=args.etp)
        layout = init_layout(ParallelSection(**sizes))
        action(layout)
    except (ValueError, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    except RankError:  # the rank that failed has said it
        return 2
    finally:
        if layout is not None:
            layout.close()
    return 0
