"""Environment variables that others set and that can change a run: what each one does, and what happens to it.

`environment_variables.tsv` is the only list; docs/environment.md and `megagrpo doctor` show it. `settle` applies it to
a command before servers and ranks start, and `inherited` to the environment of a server. A variable that is in no row
is passed on.
"""

from __future__ import annotations

import importlib.util
import locale
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from megagrpo.platform.process.variables import RENDEZVOUS_VARIABLE

TABLE_FILE = Path(__file__).with_name("environment_variables.tsv")
FATES = PASSED, IGNORED, REMOVED, REFUSED = "passed on", "ignored with a warning", "removed for servers", "refused"


class Row(NamedTuple):
    """Variables with one reader and one effect. `names` are patterns, separated by spaces. `harmful` is a value that
    makes a run slow or wrong, in capitals, or "" for any value; with `on_gpus` it matters on GPUs only."""

    names: str
    reader: str
    fate: str
    effect: str
    harmful: str | None = None
    fix: str = "unset it"
    on_gpus: bool = False


RANKS = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE"  # a launcher of ranks sets them all, and where ranks meet
AT = f"MASTER_ADDR MASTER_PORT {RENDEZVOUS_VARIABLE}"
OTHER_RANKS = "GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK ROLE_WORLD_SIZE ROLE_NAME NODE_RANK TORCHELASTIC_*"
END_OF_JOB = "SLURM_JOB_END_TIME"
LONGEST_JOB = 10 * 365 * 86400  # seconds
DATA_CACHES = {  # variable -> the cache of data sets below its folder; the first variable that is set counts
    "HF_DATASETS_CACHE": "",
    "HF_HOME": "datasets",
    "XDG_CACHE_HOME": "huggingface/datasets",
    "HOME": ".cache/huggingface/datasets",
}
TEXT = "LC_ALL LC_CTYPE LANG PYTHONUTF8"


def _read_table() -> Iterator[Row]:
    """Yield the rows of `environment_variables.tsv`. `harmful` is `any` there for any value."""
    fates = {fate.split()[0]: fate for fate in FATES}
    for line in TABLE_FILE.read_text(encoding="utf-8").splitlines()[1:]:
        names, reader, fate, effect, *more = line.split("\t")
        harmful, machines, fix = (*more, "", "", "")[:3]
        value = {"": None, "any": ""}.get(harmful, harmful)
        yield Row(names, reader, fates[fate], effect, value, fix or "unset it", machines == "GPU")


TABLE = tuple(_read_table())  # the first row that matches counts


class EnvironmentRefused(ValueError):
    """A variable of the environment is refused; the message names it and the fix."""


class Verdict(NamedTuple):
    """What a command does about variables besides passing them on, the reason and fix. Only IGNORED removes them."""

    names: tuple[str, ...]
    reason: str
    fix: str = "unset it"
    fate: str = IGNORED
    instead: tuple[tuple[str, str], ...] = ()  # variables that the command sets

    def __str__(self) -> str:
        ignored = "ignored: " if self.fate == IGNORED else ""
        return f"{', '.join(self.names)}: {ignored}{self.reason}; {self.fix}"


def row_of(name: str) -> Row | None:
    """Return the row of a variable, or None."""
    return next((row for row in TABLE if _in(name, row.names)), None)


def inherited(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the part of an environment that a server inherits; `server_environment` adds what the run sets."""
    kept = (PASSED, None)
    return {name: value for name, value in environment.items() if ((row := row_of(name)) and row.fate) in kept}


def settle(environment: MutableMapping[str, str]) -> list[str]:
    """Apply the table to the environment of a command that starts ranks or servers, and return the warnings.

    Raises EnvironmentRefused.
    """
    verdicts = judge(environment)
    if refused := [str(verdict) for verdict in verdicts if verdict.fate == REFUSED]:
        raise EnvironmentRefused("\n".join(refused))
    for verdict in verdicts:
        for name in verdict.names if verdict.fate == IGNORED else ():
            del environment[name]
        environment.update(verdict.instead)
    reach_loopback_directly(environment)
    return [str(verdict) for verdict in verdicts]


def judge(environment: Mapping[str, str]) -> list[Verdict]:
    """Return what `settle` ignores and refuses; changes nothing."""
    return [
        *_ranks(environment),
        *_end_of_job(environment),
        *_proxies(environment),
        *_caches(environment),
        *_interpreter(),
    ]


def launched(environment: Mapping[str, str]) -> bool:
    """Whether a launcher of ranks started this process: its variables are complete and their numbers consistent."""
    rank, world, local, here = (_number(environment.get(name, "")) for name in RANKS.split())
    if rank is None or world is None or local is None or here is None or not (rank < world and local < here <= world):
        return False
    if world == 1:
        return True
    if folder := environment.get(RENDEZVOUS_VARIABLE):
        return Path(folder).is_dir()
    return bool(environment.get("MASTER_ADDR")) and _number(environment.get("MASTER_PORT", "")) is not None


def under_torchrun(environment: Mapping[str, str]) -> bool:
    """Whether this process is a rank whose parent process is torchrun's agent."""
    return "TORCHELASTIC_RUN_ID" in environment and launched(environment)


def end_of_job(environment: Mapping[str, str]) -> float | None:
    """Return the end of this Slurm job in seconds since 1970; None without one or with an impossible variable."""
    return None if _end_of_job(environment) or not environment.get(END_OF_JOB) else float(environment[END_OF_JOB])


def _ranks(environment: Mapping[str, str]) -> Iterator[Verdict]:
    if launched(environment):
        return
    names = [*RANKS.split(), "MASTER_ADDR", "MASTER_PORT"]
    # ignoring them would train once per rank
    if environment.get("RANK") and environment.get("WORLD_SIZE", "") not in ("", "1"):
        missing = [
            name
            for name in names
            if not environment.get(name) and not (name in AT and environment.get(RENDEZVOUS_VARIABLE))
        ]
        values = ", ".join(f"{name}={environment[name]}" for name in names if environment.get(name))
        problem = f"{', '.join(missing)} missing" if missing else "these values do not fit together"
        fix = (
            "unset them to train on this machine alone, or start ranks with `megagrpo launch`, on several nodes with "
            "`megagrpo submit`"
        )
        set_here = tuple(name for name in names if name in environment)
        yield Verdict(set_here, f"{values}, but {problem}; a launcher of ranks sets all of them", fix, REFUSED)
    elif set_here := tuple(name for name in environment if _in(name, f"{RANKS} {AT} {OTHER_RANKS}")):
        yield Verdict(set_here, "not all that a launcher of ranks sets is set")
    if options := tuple(name for name in environment if _in(name, "PET_*")):
        yield Verdict(options, "the run passes its own options to torchrun")


def _end_of_job(environment: Mapping[str, str]) -> list[Verdict]:
    text, job = environment.get(END_OF_JOB, ""), environment.get("SLURM_JOB_ID")
    now, end = time.time(), _number(text)
    if not text:
        return []
    if end is None or end > now + LONGEST_JOB:
        return [Verdict((END_OF_JOB,), f"{text} is not the end of a job in seconds since 1970")]
    if end < now:
        return [Verdict((END_OF_JOB,), f"{text} is in the past, so that job has ended")]
    if (own := _job_of_this_process()) not in (None, job) and "SLURM_HET_SIZE" not in environment:
        return [Verdict((END_OF_JOB,), f"it is the end of job {job}, but this process belongs to job {own}")]
    return []


def _job_of_this_process() -> str | None:
    """Return the Slurm job that this process's control group names, if any."""
    try:
        match = re.search(r"/job_(\d+)(/|$)", Path("/proc/self/cgroup").read_text(), re.MULTILINE)
    except OSError:
        return None
    return match[1] if match else None


def _proxies(environment: Mapping[str, str]) -> Iterator[Verdict]:
    """Yield the proxies for which httpx, which also downloads from the hub, would raise an exception."""
    for name in PROXIES.split():
        if problem := proxy_problem(environment.get(name, "")):
            yield Verdict((name,), *problem)


def _caches(environment: Mapping[str, str]) -> Iterator[Verdict]:
    """Yield the variable that places the data sets' cache, which any data file needs, where it cannot be created."""
    name, below = next(
        (place for place in DATA_CACHES.items() if environment.get(place[0])), ("HOME", DATA_CACHES["HOME"])
    )
    folder = Path(environment.get(name) or os.path.expanduser("~"), below)
    existing = next((path for path in (folder, *folder.parents) if path.exists()), Path())
    if not (existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)):
        reason = f"{folder} cannot be written, so data sets are cached in the temporary folder of this run"
        instead = (("HF_DATASETS_CACHE", str(Path(tempfile.gettempdir(), "datasets"))),)
        yield Verdict((name,), reason, "set HF_DATASETS_CACHE to a folder that you can write", PASSED, instead)


def _interpreter() -> Iterator[Verdict]:
    """Yield what this interpreter has already taken from its environment or command line."""
    if sys.flags.inspect:
        reason = "Python ends with another exit code than the run"
        yield Verdict(("PYTHONINSPECT",), reason, "unset it, and start Python without -i", REFUSED)
    if sys.flags.optimize:
        reason = "Python skips the assertions by which torch, Megatron and vLLM check shapes and layouts"
        yield Verdict(("PYTHONOPTIMIZE",), reason, "unset it, and start Python without -O", REFUSED)
    encoding = "utf-8" if sys.flags.utf8_mode else locale.getencoding()
    if encoding.lower().replace("_", "-") not in ("utf-8", "utf8"):
        yield Verdict(tuple(TEXT.split()), f"Python reads text files as {encoding}", "set PYTHONUTF8=1", REFUSED)


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() else None


def _in(name: str, patterns: str) -> bool:
    return any(
        name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern for pattern in patterns.split()
    )


PROXIES = "HTTP_PROXY HTTPS_PROXY ALL_PROXY http_proxy https_proxy all_proxy"
UNPROXIED = "NO_PROXY no_proxy"


def proxy_problem(value: str) -> tuple[str, str] | None:
    """Return why httpx cannot use a proxy, and the fix; None when it can."""
    try:
        parts = urlsplit(value if "://" in value else f"http://{value}")
        _ = parts.port
    except ValueError:
        return "this is not the address of a proxy", "correct or unset it"
    if parts.scheme not in ("http", "https", "socks5", "socks5h"):
        return f"httpx knows no proxies of the kind {parts.scheme}", "write http, https or socks5, or unset it"
    if parts.scheme.startswith("socks") and importlib.util.find_spec("socksio") is None:
        return "SOCKS proxies need the package socksio, which is not installed", "pip install socksio, or unset it"
    return None


def reach_loopback_directly(environment: MutableMapping[str, str]) -> None:
    """Except this host from proxies, so that trackers and rewards reach their servers on it."""
    if not any(environment.get(name) for name in PROXIES.split()):
        return
    for name in UNPROXIED.split():
        hosts = [host for host in re.split(r"[,\s]+", environment.get(name, "")) if host]
        if "*" not in hosts:
            environment[name] = ",".join(dict.fromkeys([*hosts, "localhost", "127.0.0.1", "::1"]))
