"""Options of `megagrpo export` and `merge`: --dtype, and for the Hugging Face hub --push, --private and --revision."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from megagrpo.commands.api.conversions import AUTO, EXPORT_DTYPES, export
from megagrpo.commands.arguments.layout_arguments import run_in_layout
from megagrpo.config import ConfigError
from megagrpo.platform.process.terminal import show, warn

if TYPE_CHECKING:
    from megagrpo.platform.parallel.layout import Layout


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --dtype, --push, --private and --revision."""
    add = parser.add_argument
    add(
        "--dtype",
        choices=EXPORT_DTYPES,
        default=AUTO,
        help="dtype of the weights in OUT (default auto: the dtypes of the start model's files)",
    )
    add("--push", metavar="REPO", help="upload OUT to this model repository of the Hugging Face hub, as OWNER/NAME")
    add("--private", action="store_true", help="with --push: create the repository as private")
    add("--revision", metavar="BRANCH", help="with --push: upload to this branch, which is created if missing")


def check_push_arguments(options: argparse.Namespace) -> None:
    """Raise ConfigError for options that do not fit together, and for a repository that cannot exist."""
    if options.push is None:
        alone = [f"--{name}" for name in ("private", "revision") if getattr(options, name)]
        if alone:
            raise ConfigError(f"{alone[0]}: has no effect without --push; add --push OWNER/NAME")
        return
    from megagrpo.weights.hub.upload import PushError, check_repo

    try:
        check_repo(options.push)
    except PushError as error:
        raise ConfigError(f"--push: {error}") from None


def export_and_push(options: argparse.Namespace, source: Path, merged: bool) -> int:
    """Write `options.out` in the layout of the options, and upload the folder with --push. Returns the exit code."""
    check_push_arguments(options)
    uploads = False

    def on_rank(layout: Layout) -> None:
        nonlocal uploads
        uploads = layout.world_rank == 0
        export(source, options.out, options.model, options.dtype, merged, layout)

    code = run_in_layout(options, on_rank)
    return code if code or not uploads else push_export(options)


def push_export(options: argparse.Namespace) -> int:
    """Upload `options.out` with --push, on one rank. Returns exit code 0, or 2 after an error; the folder is kept."""
    if options.push is None:
        return 0
    from megagrpo.weights.hub.upload import PushError, push

    try:
        show(f"pushed to {push(options.out, options.push, options.private, options.revision)}")
    except PushError as error:
        warn(f"error: --push: {error}")
        return 2
    return 0
