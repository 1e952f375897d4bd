"""`megagrpo report RUN [RUN ...]`: writes one HTML page about finished or running runs, without torch or network.

Exit codes: 0 when the page was written, 2 when a folder holds no run.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megagrpo.config import ConfigError
from megagrpo.platform.process.terminal import show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="folder of a run, such as runs/quickstart; several are compared")
    add(
        "-o",
        "--output",
        metavar="FILE",
        help="HTML file to write (default: RUN/report.html; report.html for several runs)",
    )


def run(options: argparse.Namespace) -> int:
    """Write the page; print its path and size. Raises ConfigError for a folder without a run or an unwritable file."""
    from megagrpo.proof.report import page
    from megagrpo.proof.report.collect import read_run
    from megagrpo.proof.report.payload import payload

    # each run once, also through a link
    folders = list({Path(name).resolve(): Path(name) for name in options.runs}.values())
    output = Path(options.output or (folders[0] / "report.html" if len(folders) == 1 else "report.html"))
    if output.is_dir():
        raise ConfigError(f"--output: {output} is a folder; name a file, such as {output / 'report.html'}")
    data = payload([read_run(folder) for folder in folders], page.static_bytes())
    html = page.render(data)
    try:
        page.write(html, output)
    except OSError as error:
        raise ConfigError(f"--output: {output} cannot be written: {error.strerror}; name another file") from None
    for folder, chosen in zip(folders, data.chosen, strict=True):
        shown, total = chosen.responses
        if shown < total:
            show(f"{folder}: the page holds {shown:,} of {total:,} responses; completions.jsonl holds all")
    show(f"{output} ({len(html.encode()) / 1e6:.2f} MB)")
    return 0
