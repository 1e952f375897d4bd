"""Uploads an exported folder to the Hugging Face hub."""

from __future__ import annotations

import os
from pathlib import Path

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled
from huggingface_hub.utils import validate_repo_id

TOKEN_HELP = (
    "make a token with write access at https://huggingface.co/settings/tokens and run `hf auth login`, or set HF_TOKEN"
)


class PushError(ValueError):
    """A failed upload. The message names the repository, the cause and the fix, and says that the folder is kept."""


def check_repo(repo: str) -> None:
    """Raise PushError when `repo` is not OWNER/NAME, or NAME of the user's own account."""
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise PushError(f"{repo!r} is no name on the hub; write OWNER/NAME: {str(error).splitlines()[0]}") from None


def push(
    folder: str | Path, repo: str, private: bool = False, revision: str | None = None, token: str | None = None
) -> str:
    """Upload `folder` to the model repository `repo` and return its address. Creates it and the branch `revision` if
    missing. `private` applies to a new repository. `token` None means HF_TOKEN or the token of `hf auth login`.

    A second call continues an upload that failed. Raises PushError; the folder is never changed.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise PushError(f"{folder} is no folder; export the checkpoint first")
    check_repo(repo)
    token = token or get_token()
    api = HfApi(token=token, library_name="megagrpo")
    try:
        if token is None:
            raise PushError(f"no token for the hub; {TOKEN_HELP}")
        created = api.create_repo(repo, private=private or None, exist_ok=True)
        if revision is not None:
            api.create_branch(created.repo_id, branch=revision, exist_ok=True)
        message = f"Upload {folder.resolve().name}"
        api.upload_folder(repo_id=created.repo_id, folder_path=folder, revision=revision, commit_message=message)
    except Exception as error:  # connection errors belong to another HTTP package in each release of huggingface_hub
        options = " --private" * private + (f" --revision {revision}" if revision else "")
        kept = f"The export is kept; upload it with: hf upload {repo} {os.fspath(folder)} .{options}"
        raise PushError(f"{repo}: {_reason(error, api.endpoint)}. {kept}") from error
    return str(created) if revision is None else f"{created}/tree/{revision}"


def _reason(error: Exception, endpoint: str) -> str:
    """Return the cause of a failed upload, and the fix."""
    if isinstance(error, PushError):
        return str(error)
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set; unset it"
    if not isinstance(error, HfHubHTTPError):
        return f"cannot upload to {endpoint} ({type(error).__name__}: {_first_line(error)}); check the network"
    status = error.response.status_code
    said = error.server_message or _first_line(error)
    if status == 401:
        return f"the hub rejected the token ({said}); {TOKEN_HELP}"
    if status == 403:
        return f"the token may not write to this repository ({said}); {TOKEN_HELP}"
    return f"the hub responded with status {status} ({said}); try again"


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")
