#!/usr/bin/env bash
# launch/local.sh CONFIG [key=value ...] [--resume]: trains on this machine. NPROC=N sets the number of ranks.
# Uses the repository's .venv if it exists, else the python3 on PATH.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PYTHON=$ROOT/.venv/bin/python
[ -x "$PYTHON" ] || PYTHON=python3
export PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH}
exec "$PYTHON" -m megagrpo.launch.local "$@"
