"""The first module of a process that the API starts: `python -m megagrpo.commands.api.entry PARENT MODULE ARGUMENT...`
calls MODULE's `main`.

The process gets SIGTERM when the process PARENT ends, also by a kill: a training run then saves and stops.
"""

from __future__ import annotations

import importlib
import signal
import sys

from megagrpo.platform.process.parent_death import end_with_parent


def main(parent: str, module: str, *arguments: str) -> int:
    """Tie this process to its parent and return the exit code of `main(arguments)` of `module`."""
    end_with_parent(int(parent), signal.SIGTERM)
    code: int = importlib.import_module(module).main(list(arguments))
    return code


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
