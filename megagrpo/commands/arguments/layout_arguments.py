"""The options --tp to --etp of the commands that load or write a model in a parallel layout."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

from megagrpo.commands.api.conversions import in_layout

if TYPE_CHECKING:
    from megagrpo.platform.parallel.layout import Layout

SIZES_OF_LAYOUT = ("tp", "pp", "vpp", "pipeline_layers", "ep", "etp")


def add_layout_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --tp, --pp, --vpp, --pipeline-layers, --ep and --etp. tp x pp and ep x etp x pp must divide the number of
    ranks: N of `megagrpo launch N`, else 1."""
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


def run_in_layout(options: argparse.Namespace, action: Callable[[Layout], None]) -> int:
    """Run `action` in the layout, on the CPU. Returns exit code 0, or 2 after a user error."""
    return in_layout(action, **{name: getattr(options, name) for name in SIZES_OF_LAYOUT})
