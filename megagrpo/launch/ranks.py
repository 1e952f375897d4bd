"""Starts the ranks of a command on this machine, like `torchrun --standalone`, but opens no port that other hosts can reach:

    megagrpo launch 4 convert MODEL OUT --tp 2
    megagrpo launch 8 verify CONFIG

The first word is the number of ranks, the second a script or a module. Exit code: the exit code of the rank that failed first.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = str(Path(__file__).resolve().parents[2])
sys.path.insert(0, ROOT)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH")]))

from megagrpo.launch.local import ONE_NODE, run_ranks, set_thread_environment  # noqa: E402


def main(arguments: list[str]) -> int:
    if arguments[:1] in (["-h"], ["--help"]):
        print(__doc__)
        return 0
    if len(arguments) < 2 or not arguments[0].isdigit() or int(arguments[0]) == 0:
        print(__doc__, file=sys.stderr)
        return 2
    set_thread_environment(int(arguments[0]))
    return run_ranks(int(arguments[0]), ONE_NODE, arguments[1:])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
