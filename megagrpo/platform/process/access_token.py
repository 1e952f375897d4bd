"""The access token of a run: of its servers and, on several nodes, of its ranks."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from megagrpo.platform.process.variables import ENVIRONMENT, TOKEN_FILE_VARIABLE, TOKEN_VARIABLE

MIN_TOKEN_LENGTH = 16


def read_token(file: str | Path | None, keep: bool = False) -> str | None:
    """Read the token. Without `keep`, remove it from the environment so that child processes do not inherit it.

    The first source that exists counts: `file` (`rollout.token_file`), the file named by MEGAGRPO_TOKEN_FILE, the
    variable MEGAGRPO_TOKEN. Returns None without any of them. Raises ValueError when the file is unreadable, readable
    by others, or holds no valid token.
    """
    token = ENVIRONMENT.get(TOKEN_VARIABLE) if keep else ENVIRONMENT.pop(TOKEN_VARIABLE, None)
    key = "rollout.token_file"
    if file is None and (named := ENVIRONMENT.get(TOKEN_FILE_VARIABLE)):
        file, key = named, TOKEN_FILE_VARIABLE
    if file is None:
        return None if token is None else _checked(token, TOKEN_VARIABLE)
    try:
        with open(file) as opened:
            if stat.S_IMODE(os.fstat(opened.fileno()).st_mode) & 0o077:
                raise ValueError(f"{key}: {file} is readable by other users; run chmod 600 on it")
            return _checked(opened.read().strip(), f"{key}: {file}")
    except OSError as error:
        raise ValueError(f"{key}: {file} cannot be read: {error.strerror}") from error


def _checked(token: str, what: str) -> str:
    if len(token) < MIN_TOKEN_LENGTH or not (token.isascii() and token.isprintable()) or " " in token:
        rule = f"a token must be one word of {MIN_TOKEN_LENGTH} or more characters"
        raise ValueError(f"{what}: {rule}; `openssl rand -hex 32` generates one")
    return token
