"""Environment variables that others set and that can change a run: what each one does, and what happens to it.

`TABLE` is the only list; docs/environment.md and `megagrpo doctor` show it. `settle` applies it to a command before
servers and ranks start, and `inherited` to the environment of a server. A variable that is in no row is passed on.
"""

from __future__ import annotations

import locale
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import NamedTuple

from megagrpo.platform.process.proxies import PROXIES, UNPROXIED, proxy_problem, reach_loopback_directly
from megagrpo.platform.process.variables import RENDEZVOUS_VARIABLE

PASSED, IGNORED, REMOVED, REFUSED = "passed on", "ignored with a warning", "removed for servers", "refused"
FATES = {
    PASSED: "the command, its ranks and its servers read it",
    IGNORED: "the command removes it, says so, and goes on as without it",
    REMOVED: "the command and its ranks read it, servers do not get it",
    REFUSED: "the command names it and ends with exit code 2 before a server or a rank starts",
}


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


def _hurts(
    names: str, reader: str, harmful: str, effect: str, fix: str = "unset it", fate: str = PASSED, on_gpus: bool = True
) -> Row:
    return Row(names, reader, fate, effect, harmful, fix, on_gpus)


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

# The first row that matches counts.
TABLE = (
    # --------------------------------------------------------------- launchers of ranks and schedulers
    Row(f"{RANKS} {AT}", "torch", IGNORED,
        "names this process as one rank. Read only from a launcher of ranks, which sets all of RANK, WORLD_SIZE, "
        "LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT; refused with WORLD_SIZE above 1 but no complete "
        "set"),
    Row(OTHER_RANKS, "torchrun", IGNORED, "belongs to the rank of a launcher; ignored where the rank is"),
    Row("PET_*", "torchrun", IGNORED,
        "changes torchrun's options (the PyTorchJob operator sets it); the run passes its own"),
    Row(END_OF_JOB, "megagrpo", IGNORED,
        "is the end of the job: the run saves before it. Ignored if it is in the past, is not in seconds since 1970, "
        "or belongs to another job than this process"),
    Row("SLURM_* SLURMD_* SRUN_* SBATCH_*", "Slurm", REMOVED,
        "describes a job; only the end of the job, the index of the node and its name are read"),
    Row("PMI_* PMIX_* PMI2_* OMPI_* PRTE_* MPI_* MV2_* HYDRA_* I_MPI_* PALS_* FLUX_*", "MPI", REMOVED,
        "makes a library that loads MPI connect to a launcher that is not the server's"),
    Row("ACCELERATE_* FSDP_* DEEPSPEED_* CROSS_RANK CROSS_SIZE LOCAL_SIZE", "accelerate, DeepSpeed", REMOVED,
        "describes the ranks of another launcher"),
    Row("JOB_COMPLETION_INDEX", "megagrpo", PASSED, "is the index of this node in a Kubernetes job"),
    Row("LOGLEVEL", "torchrun", PASSED, "sets torchrun's log level"),
    # ---------------------------------------------------------------------------------------- megagrpo
    Row("MEGAGRPO_TOKEN MEGAGRPO_TOKEN_FILE", "megagrpo", REMOVED,
        "holds the token of servers and ranks; a server reads it from a pipe"),
    Row("MEGAGRPO_LAUNCHER_PID", "megagrpo", REMOVED, "is the process id of the launcher of the ranks"),
    Row("MEGAGRPO_JOB", "megagrpo", PASSED,
        "is the job of a scheduler: later attempts of it resume the run, and SIGTERM ends it with 85"),
    Row("NPROC", "megagrpo", PASSED, "is the number of ranks"),
    Row("MEGAGRPO_*", "megagrpo", PASSED, "sets the log level, the cache of models, or the kind of CPU"),
    # -------------------------------------------------------------------------------------------- vLLM
    Row("VLLM_API_KEY", "vLLM", REMOVED, "makes the server reject the run's own token"),
    Row("VLLM_HOST_IP VLLM_LOOPBACK_IP VLLM_PORT VLLM_RPC_BASE_PATH HOST_IP", "vLLM", REMOVED,
        "is where a server's processes meet; the run chooses it. Kubernetes sets VLLM_PORT to an URL when a service "
        "is named vllm"),
    Row("VLLM_SERVICE_* VLLM_PORT_*", "Kubernetes", REMOVED, "describes a service that is named vllm"),
    Row("VLLM_DP_* VLLM_ELASTIC_EP_* VLLM_RAY_*", "vLLM", REMOVED,
        "places a server's workers; rollout.tp, pp and dp do"),
    Row(
        "VLLM_PLUGINS VLLM_SERVER_DEV_MODE VLLM_PROCESS_NAME_PREFIX VLLM_NO_USAGE_STATS VLLM_DO_NOT_TRACK "
        "DO_NOT_TRACK VLLM_ALLOW_RUNTIME_LORA_UPDATING VLLM_BATCH_INVARIANT", "vLLM", REMOVED,
        "is set by the run for its servers"),
    Row("VLLM_CPU_* VLLM_TARGET_DEVICE", "vLLM", REMOVED,
        "sets cache, threads and kernels of vLLM for CPU; the run sets them"),
    Row("VLLM_USE_RUST_FRONTEND VLLM_RUST_FRONTEND_PATH VLLM_ALLOW_INSECURE_SERIALIZATION", "vLLM", REMOVED,
        "replaces the HTTP server that checks the run's token, or lets requests hold code"),
    Row(
        "VLLM_USE_V1 VLLM_USE_V2_MODEL_RUNNER VLLM_ENABLE_V1_MULTIPROCESSING VLLM_WORKER_MULTIPROC_METHOD "
        "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION VLLM_HTTP_TIMEOUT_KEEP_ALIVE VLLM_KEEP_ALIVE_ON_ENGINE_DEATH", "vLLM",
        REMOVED, "changes processes and requests that the run's plug-in and client rely on"),
    Row(
        "VLLM_TEST_FORCE_LOAD_FORMAT VLLM_MODEL_REDIRECT_PATH VLLM_USE_MODELSCOPE "
        "VLLM_MOE_ROUTING_SIMULATION_STRATEGY VLLM_ALLOW_LONG_MAX_MODEL_LEN VLLM_REPLICATE_EMBED", "vLLM", REMOVED,
        "makes vLLM compute another model than the trainer"),
    Row(
        "VLLM_MAX_N_SEQUENCES VLLM_MAX_COMPLETION_PROMPTS VLLM_MAX_STOP_STRINGS VLLM_MAX_NUM_BAD_WORDS "
        "VLLM_MAX_BAD_WORDS_TOTAL_TOKENS", "vLLM", REMOVED, "limits the run's own requests"),
    Row("VLLM_CONFIGURE_LOGGING VLLM_LOGGING_CONFIG_PATH VLLM_LOGGING_PREFIX VLLM_LOGGING_STREAM VLLM_LOGGING_COLOR",
        "vLLM", REMOVED, "changes the form of the server's log, in which the run finds why a server ended"),
    _hurts("VLLM_TRACE_FUNCTION", "vLLM", "1", "vLLM writes a line for each function call", on_gpus=False),
    Row("VLLM_*", "vLLM", PASSED, "selects kernels, caches, timeouts and log levels of vLLM"),
    # --------------------------------------------------------------------- networks, the hub, trackers
    Row(PROXIES, "httpx, urllib", PASSED,
        "carries downloads and requests of trackers and rewards, never traffic between ranks, trainer and servers. "
        "Ignored with a warning if httpx cannot use it: another scheme than http, https and socks5, an invalid port, "
        "or socks5 without the package socksio"),
    Row(UNPROXIED, "httpx, urllib", PASSED, "names hosts without a proxy; the run adds localhost, 127.0.0.1 and ::1"),
    Row("SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE CURL_CA_BUNDLE", "httpx, urllib", PASSED,
        "names certificates for downloads"),
    Row("HF_HOME HF_DATASETS_CACHE", "Hugging Face", PASSED,
        "places the caches. If the cache of data sets cannot be written, the run says so and uses its temporary "
        "folder"),
    Row("HF_* HUGGINGFACE_* HUGGING_FACE_* TRANSFORMERS_* DATASETS_*", "Hugging Face", PASSED,
        "sets caches, token, endpoint and offline mode of the hub"),
    Row("TOKENIZERS_PARALLELISM", "Hugging Face", REMOVED, "starts threads in the tokenizer; false for servers"),
    Row("WANDB_* MLFLOW_* TRACKIO_* COMET_*", "trackers", PASSED,
        "configures a tracker; keys in the config take precedence"),
    # -------------------------------------------------------------------------------------------- CUDA
    Row("CUDA_VISIBLE_DEVICES", "CUDA", PASSED,
        "selects GPUs by index or UUID; each server gets its own part. An entry that CUDA does not accept, such as "
        "-1, hides all later ones. Without an NVIDIA driver it has no effect"),
    _hurts("CUDA_LAUNCH_BLOCKING", "CUDA", "1", "each kernel waits for the last one: many times slower"),
    Row("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA", REMOVED,
        "orders kernels of tensor and context parallelism; slows vLLM down"),
    _hurts("CUBLAS_WORKSPACE_CONFIG", "CUDA", "", "products may use slower kernels", "use run.deterministic instead",
        REMOVED),
    Row("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "Transformer Engine", REMOVED, "is set by run.deterministic"),
    _hurts("NVTE_FLASH_ATTN", "Transformer Engine", "0",
        "Transformer Engine has fewer attention kernels to choose from"),
    _hurts("NVTE_FUSED_ATTN", "Transformer Engine", "0", "without flash-attn, attention keeps all scores in memory"),
    _hurts("NVIDIA_TF32_OVERRIDE TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "CUDA", "1",
        "float32 products have 10 bits of mantissa"),
    Row("CUDA_* CUDNN_* CUBLAS_* CUBLASLT_* NVIDIA_* NVTE_*", "CUDA", PASSED, "configures CUDA and its libraries"),
    # ----------------------------------------------------------------------------------- NCCL and gloo
    _hurts("NCCL_P2P_DISABLE", "NCCL", "1", "GPUs of a node send through host memory"),
    _hurts("NCCL_SHM_DISABLE", "NCCL", "1", "NCCL sends through network sockets within a node"),
    _hurts("NCCL_IB_DISABLE", "NCCL", "1", "NCCL uses TCP between nodes", "unset it, unless the nodes have no RDMA"),
    _hurts("NCCL_NET_GDR_LEVEL", "NCCL", "LOC", "NCCL copies through host memory before RDMA"),
    _hurts("NCCL_ALGO", "NCCL", "", "an algorithm that a collective lacks is an error", fate=REMOVED),
    _hurts("NCCL_PROTO", "NCCL", "", "it forbids protocols that NCCL would choose by size"),
    _hurts("NCCL_DEBUG", "NCCL", "TRACE", "NCCL writes a line for each call", "use NCCL_DEBUG=WARN"),
    _hurts("NCCL_ASYNC_ERROR_HANDLING TORCH_NCCL_ASYNC_ERROR_HANDLING", "torch", "0",
        "a failed collective hangs and raises no error"),
    _hurts("TORCH_NCCL_BLOCKING_WAIT NCCL_BLOCKING_WAIT", "torch", "1", "the host waits for each collective"),
    Row("NCCL_SOCKET_IFNAME GLOO_SOCKET_IFNAME", "NCCL, gloo", PASSED,
        "names the network interface; a run on one host uses loopback"),
    Row("NCCL_* GLOO_* TP_SOCKET_IFNAME UCX_* FI_*", "NCCL, gloo", PASSED, "configures messages between ranks"),
    # ------------------------------------------------------------------------------------------- torch
    _hurts("TORCH_DISTRIBUTED_DEBUG", "torch", "DETAIL", "every collective is checked by another one", on_gpus=False),
    _hurts("PYTORCH_NO_CUDA_MEMORY_CACHING", "torch", "1", "each allocation is a call of cudaMalloc"),
    Row("PYTORCH_ALLOC_CONF PYTORCH_CUDA_ALLOC_CONF", "torch", PASSED,
        "configures torch's allocator; weights for CUDA IPC are kept outside of expandable segments"),
    _hurts("PYTORCH_JIT", "torch", "0", "scripted functions of Megatron run unfused"),
    _hurts("TORCHDYNAMO_DISABLE TORCH_COMPILE_DISABLE", "torch", "1", "vLLM does not compile its model"),
    Row("TORCH_* PYTORCH_* TORCHDYNAMO_* TORCHINDUCTOR_*", "torch", PASSED,
        "configures torch, its compiler and its logs"),
    _hurts("TRITON_INTERPRET", "Triton", "1", "Triton kernels run in Python"),
    Row("TRITON_*", "Triton", PASSED, "configures Triton"),
    # ----------------------------------------------------------------------------------------- threads
    Row("OMP_NUM_THREADS", "OpenMP", REMOVED,
        "is the number of threads of a rank; a server on GPUs chooses its own, one on a CPU gets rollout.omp_threads"),
    Row(
        "OMP_PLACES OMP_PROC_BIND OMP_THREAD_LIMIT OMP_DYNAMIC GOMP_CPU_AFFINITY KMP_AFFINITY KMP_HW_SUBSET "
        "MKL_NUM_THREADS MKL_DOMAIN_NUM_THREADS OPENBLAS_NUM_THREADS", "OpenMP, MKL", REMOVED,
        "binds or counts the threads of one process; servers would take the trainer's cores"),
    Row("OMP_* GOMP_* KMP_* MKL_* OPENBLAS_* NUMEXPR_* ONEDNN_* DNNL_* ATEN_CPU_CAPABILITY", "OpenMP, MKL, oneDNN",
        PASSED, "configures threads and kernels on a CPU"),
    # --------------------------------------------------------------------------- Python and the system
    Row("PYTHONINSPECT", "Python", REFUSED, "replaces the exit code, and opens a prompt at the end"),
    Row("PYTHONOPTIMIZE", "Python", REFUSED,
        "removes the assertions by which torch, Megatron and vLLM check shapes and layouts"),
    Row(TEXT, "Python", PASSED, "sets the encoding of text files; refused if it is not UTF-8"),
    Row("PYTHONDONTWRITEBYTECODE", "Python", REMOVED, "makes every start of vLLM take twice as long"),
    Row(
        "PYTHONWARNINGS PYTHONSTARTUP PYTHONDEVMODE PYTHONASYNCIODEBUG PYTHONPROFILEIMPORTTIME PYTHONMALLOC "
        "PYTHONTRACEMALLOC", "Python", REMOVED,
        "debugs one program; it can stop a server at a warning, or slow it down"),
    Row("PYTHONPATH", "Python", PASSED, "names folders whose modules come before the installed ones"),
    Row("PYTHON*", "Python", PASSED, "configures Python: hashing, buffers, limits, paths"),
    Row("LD_PRELOAD LD_LIBRARY_PATH", "the linker", PASSED, "names libraries that replace installed ones"),
    Row("GLIBC_TUNABLES MALLOC_*", "glibc", PASSED,
        "configures memory; a server without a GPU gets large pages unless it is set"),
    Row("TMPDIR", "Python", PASSED, "is the folder of temporary files; /tmp if it cannot be written"),
    Row("HOME XDG_CACHE_HOME XDG_CONFIG_HOME", "libraries", PASSED, "holds caches of models and kernels"),
    Row("TERM COLUMNS NO_COLOR", "the terminal", PASSED, "changes how progress is drawn, and nothing in files"),
)  # fmt: skip


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
