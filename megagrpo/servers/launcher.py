"""Starts, watches and stops vLLM's OpenAI API servers, each in its own process group under a supervisor.

The trainer never imports vLLM: a server is a command line, a log file and an address. A supervisor (`supervisor.py`) ends the server and
all its processes when the trainer exits, even by SIGKILL.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import dropwhile, groupby, takewhile
from pathlib import Path

import httpx

from megagrpo.engine.access import GUARD
from megagrpo.engine.http import CERTIFICATES, MovedServers
from megagrpo.engine.protocol import EngineStartError
from megagrpo.process.progress import SILENT, Progress, Task
from megagrpo.process.variables import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE
from megagrpo.servers.launched import LaunchedServer
from megagrpo.servers.options import ServerOptions
from megagrpo.servers.ports import check_port, free_ports, is_free
from megagrpo.servers.supervisor import ENGINE_ENDED
from megagrpo.transfer.shm_names import remove_stale

HOST = "127.0.0.1"
HERE = Path(__file__).parent
GRACE_SECONDS = 10.0  # between SIGTERM and SIGKILL
MAX_BATCHED_TOKENS = 4096  # tokens of one prefill batch on a CPU
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # the ranks that vLLM allocates adapter slots for
LOG_LINES = 30  # log lines shown when a server does not start and no process logged an exception
ERROR = re.compile(r"\(\w+ pid=\d+\) ERROR \S+ \S+ \[[^\]]+\] ")  # prefix of each line that one of vLLM's processes logs as an error
KILLED = {code: number for number in (signal.SIGKILL, signal.SIGTERM) for code in (-number, 128 + number)}  # exit code -> signal
TRACEBACK = "Traceback (most recent call last):"


# Flags by which a sleeping server also frees the pools of CUDA graphs and NCCL's buffers. New in vLLM 0.32.
SLEEP_FLAGS = ("--sleep-mode-offload-cudagraph", "--enable-nccl-comm-suspend")
# Variables of the trainer's GPUs that would slow vLLM down, or select algorithms that its collectives lack.
TRAINER_VARIABLES = ("CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_ALGO", "CUBLAS_WORKSPACE_CONFIG", "NVTE_ALLOW_NONDETERMINISTIC_ALGO")


@dataclass
class Server:
    """One running server: its name, log file and supervisor process. The name is the URL that clients know. `address` is the URL that the
    server listens on; it differs after a restart on another port."""

    url: str
    log: Path
    supervisor: subprocess.Popen[bytes] = field(repr=False)
    started: float = 0.0  # monotonic clock
    address: str = ""  # empty means `url`

    def __post_init__(self) -> None:
        self.address = self.address or self.url

    @property
    def process(self) -> int:
        """Identity of the server's process: a restarted server has another one."""
        return self.supervisor.pid

    @property
    def alive(self) -> bool:
        """Whether the server's process is running."""
        return self.supervisor.poll() is None

    @property
    def killed(self) -> bool:
        """Whether the server ended by SIGKILL or SIGTERM: the out-of-memory killer, or a user."""
        return self.supervisor.returncode in KILLED

    @property
    def exit_description(self) -> str:
        """How the server ended, as text for a message."""
        code = self.supervisor.returncode
        if code == ENGINE_ENDED:
            return "was killed because its engine had ended"
        return f"was killed by {KILLED[code].name}" if self.killed else f"ended with exit code {code}"

    def end(self) -> None:
        """Stop the server and all its processes: SIGTERM, then SIGKILL. Does nothing if it has already ended."""
        if self.alive:
            self.supervisor.send_signal(signal.SIGTERM)
        try:
            self.supervisor.wait(GRACE_SECONDS + 5)
        except subprocess.TimeoutExpired:
            os.killpg(self.supervisor.pid, signal.SIGKILL)
            self.supervisor.wait()

    def log_tail(self, lines: int = LOG_LINES) -> str:
        """Return the last lines of the log; the whole log for `lines=0`."""
        try:
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
        except OSError as error:
            return f"({self.log}: {error.strerror})"

    def cause(self) -> str:
        """Return the first exception that one of the server's processes logged, without its stack; empty when none did.

        The end of the log only shows the parent process's exception, which says that a child process failed.
        """
        errors = [match for line in self.log_tail(0).splitlines() if (match := ERROR.match(line))]
        for _, record in groupby(errors, key=lambda match: match[0]):
            lines = [match.string[match.end() :] for match in record]
            if TRACEBACK in lines:
                message = dropwhile(lambda line: line.startswith(" "), lines[lines.index(TRACEBACK) + 1 :])
                return " ".join(takewhile(str.strip, message))
        return ""


class Launcher:
    """`num_servers` servers on this host: call `start`, then `wait`, then `stop`. A context manager that stops them on exit.

    `start` returns at once, so the trainer can build its model while vLLM starts. `port` is the first server's port, the others take the
    next ones; 0 picks free ports. `devices` are GPU ids, `options.devices` for each server; None runs vLLM for CPU.

    Servers listen only on the address `host`, and require `token` if given. Server N, counted from `first`, logs to `log_dir/vllm_N.log`.
    A server that has ended may be restarted up to `max_restarts` times (`may_restart`). With `moved`, a server whose port another process
    took restarts on another port, and clients learn the new address from `moved`. Raises ValueError when there are too few devices.
    """

    def __init__(
        self,
        options: ServerOptions,
        log_dir: str | Path,
        *,
        num_servers: int = 1,
        port: int = 0,
        devices: Sequence[str] | None = None,
        startup_timeout: float = 600.0,
        host: str = HOST,
        token: str | None = None,
        max_restarts: int = 0,
        moved: MovedServers | None = None,
        first: int = 0,
    ):
        if devices is not None and len(devices) < num_servers * options.devices:
            wanted = f"rollout.servers {num_servers} x {options.sizes} need {num_servers * options.devices} GPUs"
            raise ValueError(f"{wanted}; {len(devices)} were given: lower one of them")
        self.options, self.log_dir, self.num_servers, self.port = options, Path(log_dir), num_servers, port
        self.devices, self.startup_timeout = devices, startup_timeout
        self.host, self.token = host, token
        self.max_restarts, self._moved, self._first = max_restarts, moved, first
        self.restarts: Counter[str] = Counter()  # URL -> number of restarts
        self.servers: list[Server] = []
        self.progress: Progress = SILENT  # shows the wait for servers; set by the caller

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def urls(self) -> list[str]:
        """URLs of the servers, in order."""
        return [server.url for server in self.servers]

    @property
    def logs(self) -> list[Path]:
        """Log files of the servers, in order."""
        return [server.log for server in self.servers]

    def start(self) -> None:
        """Start all servers without waiting for them. Raises EngineStartError, before any server starts, when vLLM is not installed, the
        model folder has no config.json or a port is taken."""
        if importlib.util.find_spec("vllm") is None:
            raise EngineStartError(f"vLLM is not installed for {sys.executable}; run `megagrpo install`")
        if Path(self.options.model).is_absolute() and not Path(self.options.model, "config.json").exists():
            raise EngineStartError(f"model.path: {self.options.model} holds no config.json; vLLM needs a Hugging Face folder")
        self.log_dir.mkdir(parents=True, exist_ok=True)
        remove_stale()
        if self._moved is not None:
            self._moved.forget()
        ports = [self.port + i for i in range(self.num_servers)] if self.port else free_ports(self.host, self.num_servers)
        for port in ports:
            check_port(self.host, port)
        atexit.register(self.stop)
        self._pid = os.getpid()
        for index, port in enumerate(ports):
            self.servers.append(self._launch(index, port))

    def wait(self, say: Callable[[str], None] = lambda text: None) -> list[str]:
        """Wait until all servers respond and return their URLs. `say` gets a line every few seconds, or one if `self.progress` is drawn.

        A server that was killed is restarted. Raises EngineStartError when a server exits by itself, is killed too often, or does not
        respond within `startup_timeout` seconds. The message has the cause, or else the end of the log. All servers are stopped then.
        """
        with self.progress.task("waiting for vLLM") as task:
            return self._wait(say, task)

    def _wait(self, say: Callable[[str], None], task: Task) -> list[str]:
        begun, reported = time.monotonic(), 0.0
        waiting = list(range(self.num_servers))
        while waiting:
            task.expect(self.num_servers, "servers", done=self.num_servers - len(waiting))
            now = time.monotonic()
            for index in waiting:
                server = self.servers[index]
                if not server.alive:
                    if not (server.killed and self.may_restart(server)):
                        self._give_up(server, f"{server.exit_description} after {now - server.started:.0f} s")
                    say(f"warning: {self.restart(index)}")
                    self._rename(index)  # safe to rename: no client knows the server yet
                elif now - server.started > self.startup_timeout:
                    self._give_up(server, f"did not respond within {self.startup_timeout:.0f} s (rollout.startup_timeout)")
            waiting = [index for index in waiting if not healthy(self.servers[index].address)]
            if waiting and now - begun - reported >= 5 and not (reported and self.progress.draws):
                reported = now - begun
                log = self.servers[waiting[0]].log
                say(f"waiting for {len(waiting)} vLLM server{'s' * (len(waiting) > 1)}: {reported:.0f} s, log {log}")
            time.sleep(0.1 if waiting else 0)
        return self.urls

    def stop(self) -> None:
        """Stop every server and all its processes: SIGTERM, then SIGKILL. Does nothing when called again or in a forked child."""
        if self.servers and os.getpid() != self._pid:
            return
        for server in self.servers:
            if server.alive:
                server.supervisor.send_signal(signal.SIGTERM)
        for server in self.servers:
            server.end()
        remove_stale()  # files of a server whose supervisor was killed
        if self._moved is not None:
            self._moved.forget()
        self.servers.clear()
        atexit.unregister(self.stop)

    def may_restart(self, server: LaunchedServer) -> bool:
        """Whether the server has been restarted fewer than `max_restarts` times."""
        return self.restarts[server.url] < self.max_restarts

    def restart(self, index: int) -> str:
        """Restart a server that has ended, without waiting for it, and return the line to log. The log file is appended to. The server
        keeps the port of its URL. With `moved`, it gets a free port when another process listens on the old one."""
        server = self.servers[index]
        assert not server.alive and self.may_restart(server)
        self.restarts[server.url] += 1
        port, where = int(server.url.rpartition(":")[2]), ""
        if self._moved is not None and not is_free(self.host, port):
            (fresh,) = free_ports(self.host, 1)
            port, where = fresh, f", and another process took its port (new port {fresh})"
        self.servers[index] = self._launch(index, port, how="ab", url=server.url)
        if self._moved is not None:
            self._moved.write({each.url: each.address for each in self.servers if each.address != each.url})
        return (
            f"vLLM server {server.url} {server.exit_description}{where}; restarting it, {self.restarts[server.url]} of "
            f"{self.max_restarts} times (rollout.max_restarts); log: {server.log}"
        )

    def _rename(self, index: int) -> None:
        """Change the server's name to its current address."""
        server = self.servers[index]
        self.restarts[server.address] = self.restarts.pop(server.url)
        server.url = server.address

    def _launch(self, index: int, port: int, how: str = "wb", url: str | None = None) -> Server:
        log = self.log_dir / f"vllm_{self._first + index}.log"
        supervise = [sys.executable, "-I", "-S", str(HERE / "supervisor.py"), str(os.getpid()), str(GRACE_SECONDS)]
        with log.open(how) as out:
            supervisor = subprocess.Popen(
                supervise + self._command(port),
                env=self._environment(index),
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        assert supervisor.stdin is not None, "stdin is a pipe"
        with contextlib.suppress(BrokenPipeError), supervisor.stdin as pipe:  # the supervisor may have ended already; `wait` reports that
            pipe.write((self.token or "").encode())
        address = f"http://{self.host}:{port}"
        return Server(url or address, log, supervisor, time.monotonic(), address)

    def _command(self, port: int) -> list[str]:
        o = self.options
        program = ["-m", "vllm.entrypoints.openai.api_server"] if self.devices is not None else [f"{HERE.parent}/vllm_plugin/vllm_main.py"]
        flags = {
            "--model": o.model,
            "--served-model-name": "policy",
            "--host": self.host,
            "--port": port,
            "--dtype": o.dtype,
            "--max-model-len": o.max_model_len,
            "--max-num-seqs": o.max_num_seqs,
            "--tensor-parallel-size": o.tp,
            "--pipeline-parallel-size": o.pp,
            "--data-parallel-size": o.dp,
            "--logprobs-mode": "processed_logprobs",  # log-probs of the distribution that is sampled from, temperature included
            "--uvicorn-log-level": "warning",
            "--worker-extension-cls": "megagrpo.vllm_plugin.worker_verbs.WorkerVerbs",
        }
        if o.quantization is not None:
            flags["--quantization"] = o.quantization
        if o.lora_rank:
            flags |= {"--max-loras": 1, "--max-cpu-loras": 1, "--max-lora-rank": next(rank for rank in LORA_RANKS if rank >= o.lora_rank)}
        else:
            flags["--weight-transfer-config"] = json.dumps({"backend": "megagrpo"})
        switches = ["--enable-scale-out", "--no-enable-log-requests"]
        if o.tool_parser is None:
            switches.append("--skip-tokenizer-init")
        else:
            flags |= {"--tool-call-parser": o.tool_parser, "--tokenizer": o.tokenizer or o.model}
            switches.append("--enable-auto-tool-choice")
        switches += ["--enable-lora"] * bool(o.lora_rank) + ["--enable-sleep-mode"] * o.sleep_mode
        switches += ["--enable-expert-parallel"] * o.expert_parallel
        if self.devices is not None:
            flags["--gpu-memory-utilization"] = o.gpu_memory_utilization
        else:
            # A prompt that is split over two batches rewinds its seeded generator. torch cannot do that on a CPU, so the engine would die.
            switches.append("--no-enable-chunked-prefill")
            flags["--block-size"] = 32  # responses to one prompt share only full blocks; vLLM's default of 128 exceeds most short prompts
            flags["--max-num-batched-tokens"] = max(o.max_model_len, MAX_BATCHED_TOKENS)
        if self.devices is not None and o.sleep_mode:
            switches += [flag for flag in SLEEP_FLAGS if _vllm_knows(flag)]
        if self.token is not None:
            flags["--middleware"] = GUARD
        if o.enforce_eager or self.devices is None:  # compiling on a CPU takes longer than it saves
            switches.append("--enforce-eager")
        return [sys.executable, *program, *(str(word) for flag in flags.items() for word in flag), *switches, *o.extra_args]

    def _environment(self, index: int) -> dict[str, str]:
        # vLLM forms process groups of its own, so torchrun's variables for the trainer's ranks must not reach it.
        ranks = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR MASTER_PORT".split()
        ours = (*ranks, TOKEN_VARIABLE, TOKEN_FILE_VARIABLE, *TRAINER_VARIABLES)
        env = {key: value for key, value in os.environ.items() if key not in ours and not key.startswith("TORCHELASTIC_")}
        env |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "TOKENIZERS_PARALLELISM": "false"}
        env["VLLM_PLUGINS"] = "megagrpo"
        env["VLLM_PROCESS_NAME_PREFIX"] = "megagrpo-vllm"  # `ps | grep megagrpo` then shows EngineCore and workers too
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all workers of a server are on one host
        if self.host == HOST:
            env["NCCL_SOCKET_IFNAME"] = "lo"  # all ranks that send them weights are on this host too
        if self.token is not None:
            env[TOKEN_FILE_VARIABLE] = "/dev/stdin"  # a pipe, empty after one read; any process of this user can read an environment
        if self.options.lora_rank:
            env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
        env.pop("PYTHONDONTWRITEBYTECODE", None)  # without compiled bytecode of vLLM every start takes twice as long
        if self.devices is not None:
            env.pop("OMP_NUM_THREADS", None)  # the launcher of the ranks sets it to a rank's share of the cores
            if self.options.deterministic:
                env["VLLM_BATCH_INVARIANT"] = "1"
            first = index * self.options.devices
            return env | {"CUDA_VISIBLE_DEVICES": ",".join(self.devices[first : first + self.options.devices])}
        workers = self.num_servers * self.options.devices
        threads = self.options.omp_threads or max(1, len(os.sched_getaffinity(0)) // workers)
        # A sync allocates new memory for every weight. In the kernel's default pages of 4 KiB that takes longer than the copy itself.
        env.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
        return env | {
            "VLLM_CPU_KVCACHE_SPACE": str(math.ceil(self.options.kv_cache_gb)),  # vLLM reads whole GiB
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # binding fails for tp > 1 on one NUMA node, and competes with the trainer for cores
            "OMP_NUM_THREADS": str(threads),
            "OMP_WAIT_POLICY": "PASSIVE",  # spinning threads slow the trainer beside them down by a factor of ten
            "GOMP_SPINCOUNT": "0",
            "TORCH_COMPILE_DISABLE": "1",  # without this the sampler runs a C++ compiler in the first request
        }

    def _give_up(self, server: Server, what: str) -> None:
        cause, tail = server.cause(), server.log_tail()
        self.stop()
        reason = f": {cause}. Its log: {server.log}" if cause else f". The end of its log {server.log}:\n{tail}"
        raise EngineStartError(f"vLLM server {server.url} {what}{reason}")


@functools.cache
def _vllm_knows(flag: str) -> bool:
    """Whether the installed vLLM has this command line flag. Reads vLLM's source, because importing vLLM takes seconds."""
    spec = importlib.util.find_spec("vllm")
    folders = spec.submodule_search_locations if spec is not None else None
    source = Path(next(iter(folders)), "engine", "arg_utils.py") if folders else None
    return source is not None and source.exists() and f'"{flag}"' in source.read_text()


def healthy(url: str) -> bool:
    """Whether the server at `url` passes its health check."""
    try:
        return httpx.get(f"{url}/health", timeout=5, verify=CERTIFICATES).status_code == 200
    except httpx.HTTPError:
        return False
