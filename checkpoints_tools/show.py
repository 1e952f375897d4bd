"""Lists the tensors of a checkpoint, an adapter or a model: `megagrpo inspect` with the same arguments."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # holds megagrpo if it is not installed

from megagrpo.__main__ import main

if __name__ == "__main__":
    raise SystemExit(main(["inspect", *sys.argv[1:]], prog=Path(__file__).name))
