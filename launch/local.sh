#!/usr/bin/env bash
# launch/local.sh CONFIG [key=value ...] [--resume]: `megagrpo train` with the clone's .venv if it exists, else the python3 on PATH.
# NPROC=N sets the number of ranks.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PYTHON=$ROOT/.venv/bin/python
[ -x "$PYTHON" ] || PYTHON=python3
export PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH}
exec "$PYTHON" -m megagrpo train "$@"
