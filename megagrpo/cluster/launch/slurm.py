"""Writes a run as an sbatch script: `launch/train.sbatch` with its settings replaced. Every value is quoted, so none
can become a command."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from megagrpo.cluster.launch.job import Cluster, Placement, job_folder
from megagrpo.config import ConfigError, RunConfig
from megagrpo.config.io import shipped_folder
from megagrpo.trainer.saving.time_limit import seconds_of

TRAIN_SCRIPT = shipped_folder("launch") / "train.sbatch"
BEGIN, END = "# " + "-" * 115 + " settings\n", "# " + "-" * 108 + " end of settings\n"
SBATCH_NAME, SBATCH_VALUE = re.compile(r"[a-z][a-z-]*"), re.compile(r"[\w.,:/@%+=*()\[\]&|!-]+")
HOURS = re.compile(r"(\d+-)?\d+:\d+:\d+")
OPTION_LINE = re.compile(r"^#SBATCH --([a-z-]+)=?(.*)$", re.MULTILINE)


def sbatch_script(
    config: RunConfig, config_name: str, overrides: Sequence[str], cluster: Cluster, placement: Placement
) -> str:
    """Return the script. `config_name` is a path or megagrpo:NAME. Raises ConfigError for values it cannot contain."""
    top, _, rest = TRAIN_SCRIPT.read_text().partition(BEGIN)
    _, _, body = rest.partition(END)
    stated: dict[str, Any] = {name: value or True for name, value in OPTION_LINE.findall(top)}
    options = stated | _checked(cluster.sbatch, {*stated, "gpus-per-node"} - {"output"})
    options |= {"job-name": config.run.name, "nodes": placement.nodes, "signal": f"B:USR1@{cluster.lead_seconds}"}
    if cluster.gpus_per_node:
        options["gpus-per-node"] = cluster.gpus_per_node
    if config.run.time_limit is not None:
        options["time"] = config.run.time_limit
    limit = str(options.get("time", ""))
    if HOURS.fullmatch(limit) and seconds_of(limit) <= cluster.lead_seconds:
        raise ConfigError(
            f"lead_seconds: {cluster.lead_seconds} s is not less than the job's time limit {limit}, so the job would "
            "stop at once; lower it, or raise the time limit"
        )
    lines = [f"#SBATCH --{name}" if value is True else f"#SBATCH --{name}={value}" for name, value in options.items()]
    settings = _settings(config, config_name, overrides, cluster, placement)
    first = [top.partition("\n")[0], f"# {config.run.name}: written by megagrpo submit"]
    return "\n".join([*first, *lines, "", f"{BEGIN}{settings}\n{END}{body}"])


def _checked(options: Mapping[str, Any], reserved: Set[str]) -> dict[str, Any]:
    """Return a cluster's sbatch options. Raises ConfigError for a reserved option, or an invalid value."""
    for name, value in options.items():
        if not SBATCH_NAME.fullmatch(str(name)) or name in reserved:
            raise ConfigError(
                f"sbatch.{name}: megagrpo submit sets this option, or sbatch does not have it; leave it out"
            )
        if value is not True and not SBATCH_VALUE.fullmatch(str(value)):
            raise ConfigError(f"sbatch.{name}: {value!r} must not contain spaces, quotes or line breaks")
    return dict(options)


def _array(words: Sequence[str]) -> str:
    """Return words as a bash array. Commas are quoted too, or shellcheck takes them for separators."""
    quoted = [f"'{word}'" if "," in word and shlex.quote(word) == word else shlex.quote(word) for word in words]
    return f"({' '.join(quoted)})"


def _settings(
    config: RunConfig, config_name: str, overrides: Sequence[str], cluster: Cluster, placement: Placement
) -> str:
    """Return the lines between the marks: a variable of bash for each value, and the function `setup`."""
    container, root, q = cluster.container, job_folder(), shlex.quote
    srun, inside = [], []
    if container is not None and container.runtime == "pyxis":
        mounts = [f"--container-mounts={','.join(container.mounts)}"] if container.mounts else []
        srun = [f"--container-image={container.image}", *mounts, f"--container-workdir={root}"]
        # otherwise the image's value takes precedence
        srun.append(f"--container-env={','.join(['PYTHONPATH', *cluster.variables])}")
    elif container is not None:
        inside = ["apptainer", "exec", *["--nv"] * bool(cluster.gpus_per_node), "--pwd", str(root)]
        inside += [word for mount in container.mounts for word in ("--bind", mount)] + [container.image]
    memory = [f"gpu_memory_gb={cluster.gpu_memory_gb:g}"] if cluster.gpu_memory_gb and cluster.gpus_per_node else []
    preflight = ["--gpus", str(cluster.gpus_per_node)]
    preflight += ["--interface", cluster.interface] if cluster.interface else []
    if cluster.gpus_per_node and config.one_connection:
        preflight.append("--one-connection")
    exports = [f"export {name}={q(value)}" for name, value in cluster.variables.items()]
    values = {
        "REPOSITORY": q(str(root)),
        "CONFIG": q(config_name),
        "OVERRIDES": _array(overrides),
        "RUN_FOLDER": q(str(Path(config.run.output_dir) / config.run.name)),
        "PYTHON": q(cluster.python),
        "TRAINER_NODES": placement.trainer_nodes,
        "RANKS_PER_NODE": placement.ranks_per_node,
        "SERVER_NODES": placement.server_nodes,
        "SERVERS_PER_NODE": placement.servers_per_node,
        "FIRST_SERVER_GPU": placement.first_server_gpu,
        "NODES_PER_SERVER": placement.nodes_per_server,
        "PLAN": _array(memory),
        "PREFLIGHT": _array(preflight),
        "SRUN_OPTIONS": _array(srun),
        "INSIDE": _array(inside),
        "MAX_RESTARTS": cluster.restarts,
        "RESTART_FAILED": int(cluster.restart_failed),
        "SERVER_SECONDS": int(config.rollout.startup_timeout),
    }
    lines = [f"{name}={value}" for name, value in values.items()]
    return "\n".join([*lines, "setup() {", *(f"  {line}" for line in [*cluster.setup, *exports] or [":"]), "}"])
