"""Imports modules of megagrpo, each as the first one of a process.

    python tests/unit/fresh_imports.py WARM MODULE...

A process imports WARM, a comma-separated list, then forks a child per MODULE, and prints a JSON object: module ->
error, empty if none. A child imports MODULE with no module of megagrpo loaded, and fails where megatron is imported
before `megagrpo.platform.device`. WARM may contain megagrpo.platform.device, which loads a prepared megatron: the
children import megagrpo again, but not megatron.
"""

from __future__ import annotations

import builtins
import gc
import importlib
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path

ROOT = Path(__file__).parents[2]
PREPARES = "megagrpo.platform.device"


def fresh_imports(warm: list[str], modules: list[str], *folders: Path) -> dict[str, str]:
    """Import each of `modules` first in a fork of a process that has imported `warm`; return the errors, empty if the
    import works.

    Modules are looked for in this repository and in `folders`.
    """
    command = [sys.executable, "-P", "-W", "ignore", __file__, ",".join(warm), *modules]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, *folders)))}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return json.loads(done.stdout)


def forget_megagrpo() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "megagrpo"]:
        del sys.modules[name]


def guard_megatron() -> None:
    """Make an import of megatron an error until the import of `megagrpo.platform.device` starts."""
    plain = builtins.__import__

    def guarded(name, *args, **kwargs):
        if name.partition(".")[0] == "megatron" and PREPARES not in sys.modules:
            raise AssertionError(f"{name} is imported before {PREPARES}")
        return plain(name, *args, **kwargs)

    builtins.__import__ = guarded


def error_of(module: str) -> str:
    """Return the traceback of importing `module` in a fork of this process; empty if the import works."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        error = ""
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            guard_megatron()
            importlib.import_module(module)
        except BaseException:
            error = traceback.format_exc()
        with os.fdopen(write, "w") as pipe:
            pipe.write(error)
        os._exit(0 if not error else 1)
    os.close(write)
    with os.fdopen(read) as pipe:
        error = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return error or ("" if status == 0 else f"the process ended with {status}")


def main(warm: str, *modules: str) -> None:
    for name in filter(None, warm.split(",")):
        importlib.import_module(name)
    forget_megagrpo()
    gc.freeze()  # children do not copy pages to collect what they share
    print(json.dumps({module: error_of(module) for module in modules}))


if __name__ == "__main__":
    main(*sys.argv[1:])
