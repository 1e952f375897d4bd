#!/usr/bin/env bash
# docker/install.sh cpu|gpu SOURCE: installs megagrpo and the tested versions of everything it needs into the image's Python.
# The Dockerfile and the Apptainer recipe run it. SOURCE is the repository.
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,3s/^# //p' "$0" && exit ;; esac
[ $# = 2 ] || { echo "usage: docker/install.sh cpu|gpu SOURCE" >&2; exit 2; }
KIND=$1 SOURCE=$2 PYTHON=${PYTHON:-python3}

case $KIND in
  cpu) SYSTEM=libnuma1 ;;        # vLLM loads it
  gpu) SYSTEM=build-essential ;; # Transformer Engine's torch extension is compiled, and Triton compiles at run time
  *) echo "docker/install.sh: unknown kind '$KIND'; use cpu or gpu" >&2; exit 2 ;;
esac
apt-get update
apt-get install -y --no-install-recommends "$SYSTEM"
rm -rf /var/lib/apt/lists/*
"$PYTHON" -m pip install --no-cache-dir -c "$SOURCE/megagrpo/platform/install/constraints-$KIND.txt" "$SOURCE"
"$PYTHON" -m megagrpo.commands.setup.install "$KIND" wandb --installer pip --compile-bytecode # an image is often read-only
