#!/usr/bin/env bash
# launch/local.sh CONFIG [key=value ...] [--resume]: `megagrpo train` with the Python of the first of these that exists: the clone's .venv,
# the activated environment, the PATH. NPROC=N sets the number of ranks.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PYTHON=$ROOT/.venv/bin/python
[ -x "$PYTHON" ] || PYTHON=${VIRTUAL_ENV:+$VIRTUAL_ENV/bin/}python3
if [ ! -x "$ROOT/.venv/bin/python" ] && ! "$PYTHON" -c "import pydantic, yaml" 2>/dev/null; then
    echo "error: $PYTHON lacks the packages of megagrpo, and $ROOT has no .venv; run launch/setup.sh, or activate the environment that has them" >&2
    exit 2
fi
export PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH}
exec "$PYTHON" -m megagrpo train "$@"
