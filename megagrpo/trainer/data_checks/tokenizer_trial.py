"""Tries a model's tokenizer and chat template in a process with limits: they are data that can run for ever."""

from __future__ import annotations

import os
import resource
import signal
import string
import warnings
from multiprocessing import get_context
from pathlib import Path

from megagrpo.config import RunConfig
from megagrpo.data.tokens.tokenizer import Tokenizer

SECONDS = 60  # of CPU time
MOST_MEMORY = 4 * 2**30  # bytes of memory more than before the trial
_NO_MEMORY = 3  # exit code


def try_tokenizer(config: RunConfig, tokenizer: Tokenizer) -> None:
    """Render and encode one short prompt. Raises ValueError if that takes more than SECONDS or MOST_MEMORY.

    Other errors are not raised: the first row of the data shows them better.
    """
    with warnings.catch_warnings():  # a fork of a process with threads; the child starts none
        warnings.simplefilter("ignore", DeprecationWarning)
        child = get_context("fork").Process(target=_try, args=(config, tokenizer), daemon=True)
        child.start()
    child.join(10 * SECONDS)  # of a busy machine
    if child.is_alive():
        child.kill()
        child.join()
    keys = f"the chat template (data.chat_template) or the tokenizer (model.tokenizer) of {config.model.path}"
    if child.exitcode in (-signal.SIGXCPU, -signal.SIGKILL):
        raise ValueError(f"model.path: {keys} did not finish a prompt of 100 characters in {SECONDS} s; use another")
    if child.exitcode in (_NO_MEMORY, -signal.SIGABRT):
        need = f"needs more than {MOST_MEMORY / 2**30:g} GiB of memory for a prompt of 100 characters"
        raise ValueError(f"model.path: {keys} {need}; use another")


def _try(config: RunConfig, tokenizer: Tokenizer) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # an abort of the tokenizer writes there
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MOST_MEMORY,) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    data = config.data
    try:
        tokenizer.encode(string.printable, add_special_tokens=True)
        tokenizer.render(string.printable, data.system_prompt, data.chat_template, kwargs=data.chat_template_kwargs)
    except BaseException as error:
        if isinstance(error, MemoryError) or isinstance(error.__cause__, MemoryError):
            os._exit(_NO_MEMORY)
    os._exit(0)
