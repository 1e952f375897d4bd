"""Rendezvous of a run's ranks: how they find each other, where they listen, and how they authenticate messages.

On one node the ranks meet in a file, and gloo listens on loopback only. On several nodes they join the store that the
launcher serves. torch sends Python objects between ranks as pickles, and reading a pickle runs code. With a secret each
pickle carries an authentication code (HMAC-SHA256), and a pickle without the right code is not read.
"""

from __future__ import annotations

import hmac
import pickle
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from megagrpo.loopback import LOOPBACK
from megagrpo.platform.process.access_token import read_token
from megagrpo.platform.process.variables import (
    ENVIRONMENT,
    RENDEZVOUS_VARIABLE,
    TOKEN_FILE_VARIABLE,
    changed,
    number,
    put,
)

CODE_BYTES = 32
# gloo reads it when a group is created: two ranks connect at their first message, in place of all pairs at once
LAZY_CONNECTIONS = {"TORCH_GLOO_LAZY_INIT": "1"}


def join_world(backend: str, timeout: timedelta) -> None:
    """Create the default process group, by the launcher's folder, the store at MASTER_ADDR, or of this process alone.

    Raises ValueError on several nodes without a token, with which ranks sign their messages.
    """
    size, rank, folder = number("WORLD_SIZE", 1), number("RANK", 0), ENVIRONMENT.get(RENDEZVOUS_VARIABLE)
    if size == number("LOCAL_WORLD_SIZE", 1):
        put({"GLOO_SOCKET_IFNAME": LOOPBACK})  # gloo listens there alone, whatever interface the environment names
    else:
        sign_objects(_shared_token().encode())
    if size > 1 and folder:
        sign_objects(Path(folder, "secret").read_bytes())
    with changed(LAZY_CONNECTIONS):
        if size == 1:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        elif folder:
            store = dist.FileStore(f"{folder}/store", size)
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
        else:
            dist.init_process_group(backend, timeout=timeout)


def _shared_token() -> str:
    """Return the token that a run's nodes share. Raises ValueError when there is none or its file cannot be read."""
    token = read_token(None, keep=True)
    if token is None:
        raise ValueError(
            f"{TOKEN_FILE_VARIABLE}: on several nodes ranks sign their messages with a shared token, and there is no "
            "token; `openssl rand -hex 32` makes one. Give every node a file with the same token"
        )
    return token


def sign_objects(secret: bytes) -> None:
    """Sign every object that torch.distributed sends from now on, and refuse to read an object without a valid code."""
    key = hmac.digest(secret, b"objects between ranks", "sha256")

    class Signing:
        """Writes an authentication code, then the pickle. torch uses it as `pickle.Pickler`."""

        def __init__(self, file: IO[bytes]):
            self._file = file

        def dump(self, obj: Any) -> None:
            pickled = pickle.dumps(obj)
            self._file.write(hmac.digest(key, pickled, "sha256") + pickled)

    class Checking:
        """Reads a pickle with a valid code, as torch's `pickle.Unpickler`. Raises UnpicklingError for other bytes."""

        def __init__(self, file: IO[bytes]):
            self._file = file

        def load(self) -> Any:
            code, pickled = self._file.read(CODE_BYTES), self._file.read()
            if not hmac.compare_digest(code, hmac.digest(key, pickled, "sha256")):
                raise pickle.UnpicklingError(
                    "rejected an object from another rank: its authentication code is not this run's"
                )
            return pickle.loads(pickled)

    vars(distributed_c10d).update(_pickler=Signing, _unpickler=Checking)
