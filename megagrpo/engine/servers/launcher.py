"""Starts, watches and stops vLLM's OpenAI API servers, each in its own process group under a supervisor.

The trainer never imports vLLM: a server is a command line, a log file and an address. A supervisor (`supervisor.py`)
ends the server and all its processes when the trainer exits, even by SIGKILL.
"""

from __future__ import annotations

import atexit
import importlib.util
import itertools
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from itertools import dropwhile, groupby, takewhile
from pathlib import Path

from megagrpo.engine.http.connections import MovedServers, healthy
from megagrpo.engine.http.protocol import EngineStartError
from megagrpo.engine.servers import early_start
from megagrpo.engine.servers.command_line import server_command, server_environment
from megagrpo.engine.servers.followers import Followers, PartFault
from megagrpo.engine.servers.options import NodePorts, ServerNode, ServerOptions
from megagrpo.engine.servers.supervisor import ENGINE_ENDED, SERVER_GRACE_SECONDS, give, supervise
from megagrpo.loopback import LOOPBACK_ADDRESS
from megagrpo.platform.process.cleanup.ownership import remove_stale
from megagrpo.platform.process.open_files import raise_open_files
from megagrpo.platform.process.progress_hook import SILENT, Progress
from megagrpo.platform.process.terminal import LineTimes
from megagrpo.records.checkpoints.run_files import make_run_folder

FIRST_WAIT_SECONDS = 10.0  # of waiting for servers, until the first line
LOG_LINES = 30  # log lines shown when a server does not start and no process logged an exception
# prefix of each line that one of vLLM's processes logs as an error
ERROR = re.compile(r"\(\w+ pid=\d+\) ERROR \S+ \S+ \[[^\]]+\] ")
# exit code -> signal
KILLED = {code: number for number in (signal.SIGKILL, signal.SIGTERM) for code in (-number, 128 + number)}
TRACEBACK = "Traceback (most recent call last):"


@dataclass
class Server:
    """One running server: its name, log file and supervisor process. The name is the URL that clients know. `address`
    is the URL that the server listens on; it differs after a restart on another port. `fault` tells why a server on
    several nodes was stopped."""

    url: str
    log: Path
    supervisor: subprocess.Popen[bytes] = field(repr=False)
    started: float = 0.0  # monotonic clock
    address: str = ""  # empty means `url`
    fault: PartFault | None = None

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
        if self.fault is not None:
            return self.fault.killed
        return self.supervisor.returncode in KILLED

    @property
    def exit_description(self) -> str:
        """How the server ended, as text for a message."""
        if self.fault is not None:
            return self.fault.text
        code = self.supervisor.returncode
        if code == ENGINE_ENDED:
            return "was killed because its engine had ended"
        return f"was killed by {KILLED[code].name}" if self.killed else f"ended with exit code {code}"

    def end(self) -> None:
        """Stop the server and all its processes: SIGTERM, then SIGKILL. Does nothing if it has already ended."""
        if self.alive:
            self.supervisor.send_signal(signal.SIGTERM)
        try:
            self.supervisor.wait(SERVER_GRACE_SECONDS + 5)
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
        if self.fault is not None and self.fault.cause:
            return self.fault.cause
        errors = [match for line in self.log_tail(0).splitlines() if (match := ERROR.match(line))]
        for _, record in groupby(errors, key=lambda match: match[0]):
            lines = [match.string[match.end() :] for match in record]
            if TRACEBACK in lines:
                message = dropwhile(lambda line: line.startswith(" "), lines[lines.index(TRACEBACK) + 1 :])
                return " ".join(takewhile(str.strip, message))
        return ""


@dataclass(eq=False, repr=False)  # a token must not be shown
class Launcher:
    """`num_servers` servers on this host: call `start`, `wait`, `stop`. A context manager that stops them on exit.

    `start` returns at once, so the trainer can build its model while vLLM starts. `port` is the first server's port,
    the others take the next ones; 0 picks free ports. `devices` are GPU ids, `options.devices` for each server; None
    runs vLLM for CPU.

    Servers listen only on the address `host`, and require `token` if given. Server N, counted from `first`, logs to
    `log_dir/vllm_N.log`.
    A server that has ended may be restarted up to `max_restarts` times (`may_restart`). With `moved`, a server whose
    port another process took restarts on another port, and clients learn the new address from `moved`. Raises
    ValueError when there are too few devices.

    With `node` there is one server on several nodes, and this host runs its part of it. The first node's launcher
    starts the other parts through `followers`. The other nodes' launchers call `start_part` instead of `start`.
    """

    options: ServerOptions
    log_dir: Path
    _: KW_ONLY
    num_servers: int = 1
    port: int = 0
    devices: Sequence[str] | None = None
    startup_timeout: float = 600.0
    host: str = LOOPBACK_ADDRESS
    token: str | None = None
    max_restarts: int = 0
    moved: MovedServers | None = None
    first: int = 0
    node: ServerNode | None = None
    followers: Followers | None = None
    progress: Progress = SILENT  # shows the wait for servers
    servers: list[Server] = field(default_factory=list, init=False)
    restarts: Counter[str] = field(default_factory=Counter, init=False)  # URL -> number of restarts
    _ports: NodePorts = field(default=NodePorts(0, 0), init=False)

    def __post_init__(self) -> None:
        num_devices = self.num_servers * self.options.devices
        if self.devices is not None and len(self.devices) < num_devices:
            raise ValueError(
                f"rollout.servers {self.num_servers} x {self.options.sizes} need {num_devices} GPUs; "
                f"{len(self.devices)} were given: lower one of them"
            )

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
        """Start all servers without waiting for them. Raises EngineStartError, before any server starts, when vLLM is
        not installed, the model folder has no config.json or a port is taken."""
        self._prepare()
        given = range(self.port, self.port + self.num_servers)
        ports = given if self.port else free_ports(self.host, self.num_servers)
        for port in ports:
            check_port(self.host, port)
        for index, port in enumerate(ports):
            self.servers.append(self._launch(index, port))

    def start_part(self, ports: NodePorts) -> None:
        """Start a server's part on this node; its last part, if any, is ended. Raises EngineStartError as `start`."""
        if not self.servers:
            self._prepare()
        for server in self.servers:
            server.end()
        self._ports = ports
        self.servers = [self._launch(0, ports.rendezvous, how="ab" if self.servers else "wb")]

    def _prepare(self) -> None:
        """Check what servers need, and clean up after earlier ones."""
        if importlib.util.find_spec("vllm") is None:
            raise EngineStartError(f"vLLM is not installed for {sys.executable}; run `megagrpo install`")
        if Path(self.options.model).is_absolute() and not Path(self.options.model, "config.json").exists():
            raise EngineStartError(
                f"model.path: {self.options.model} holds no config.json; vLLM needs a Hugging Face folder"
            )
        raise_open_files()  # servers inherit the limit
        make_run_folder(self.log_dir)
        remove_stale()
        if self.moved is not None:
            self.moved.forget()
        atexit.register(self.stop)
        self._pid = os.getpid()

    def end_incomplete(self) -> None:
        """End a server on several nodes that has lost one of its parts."""
        for server in self.servers:
            if self.followers is not None and server.alive and (fault := self.followers.fault()):
                server.fault = fault
                server.end()

    def wait(self, say: Callable[[str], None] = lambda text: None) -> list[str]:
        """Wait until all servers respond and return their URLs. `say` gets a line after 10 s and whenever the wait has
        doubled, or one line if `self.progress` is drawn.

        A server that was killed is restarted. Raises EngineStartError when a server exits by itself, is killed too
        often, or does not respond within `startup_timeout` seconds. The message has the cause, or else the end of the
        log. All servers are stopped then.
        """
        begun, lines, said = time.monotonic(), LineTimes(FIRST_WAIT_SECONDS), False
        waiting = list(range(self.num_servers))
        with self.progress.task("waiting for vLLM") as task:
            while waiting:
                task.expect(self.num_servers, "servers", done=self.num_servers - len(waiting))
                now = time.monotonic()
                self.end_incomplete()
                for index in waiting:
                    self._check_start(index, now, say)
                waiting = [index for index in waiting if not healthy(self.servers[index].address)]
                if waiting and not (said and self.progress.draws) and lines.due(now - begun):
                    said, servers = True, f"{len(waiting)} vLLM server{'s' * (len(waiting) > 1)}"
                    say(f"waiting for {servers}: {now - begun:.0f} s, log {self.servers[waiting[0]].log}")
                time.sleep(0.1 if waiting else 0)
        return self.urls

    def _check_start(self, index: int, now: float, say: Callable[[str], None]) -> None:
        """Restart a server killed before it responded. Raises EngineStartError if it must not restart or is late."""
        server = self.servers[index]
        if not server.alive:
            if not (server.killed and self.may_restart(server.url)):
                self._give_up(server, f"{server.exit_description} after {now - server.started:.0f} s")
            say(f"warning: {self.restart(index)}")
            server = self.servers[index]  # its name may change: no client knows the server yet
            self.restarts[server.address] = self.restarts.pop(server.url)
            server.url = server.address
        elif now - server.started > self.startup_timeout:
            missing = self.followers.missing() if self.followers is not None else []
            nodes = ", ".join(map(str, missing))
            absent = f"; megagrpo serve has not joined it on node {nodes}" if missing else ""
            timeout = f"did not respond within {self.startup_timeout:.0f} s (rollout.startup_timeout)"
            self._give_up(server, timeout + absent)

    def stop(self) -> None:
        """Stop every server's processes: SIGTERM, then SIGKILL. Does nothing if called again or in a forked child."""
        if self.servers and os.getpid() != self._pid:
            return
        for server in self.servers:
            if server.alive:
                server.supervisor.send_signal(signal.SIGTERM)
        for server in self.servers:
            server.end()
        remove_stale()  # files of a server whose supervisor was killed
        if self.moved is not None:
            self.moved.forget()
        self.servers.clear()
        atexit.unregister(self.stop)

    def may_restart(self, url: str) -> bool:
        """Whether the server has been restarted fewer than `max_restarts` times, and has all its nodes."""
        lost = self.followers is not None and self.followers.lost
        return self.restarts[url] < self.max_restarts and not lost

    def restart(self, index: int) -> str:
        """Restart an ended server without waiting for it, and return the line to log. The log file is appended to. The
        server keeps its URL's port. With `moved`, it gets a free port when another process listens there."""
        server = self.servers[index]
        assert not server.alive and self.may_restart(server.url), f"{server.url} is alive or may not restart"
        self.restarts[server.url] += 1
        port, where = int(server.url.rpartition(":")[2]), ""
        if self.moved is not None and not is_free(self.host, port):
            (fresh,) = free_ports(self.host, 1)
            port, where = fresh, f", and another process took its port (new port {fresh})"
        self.servers[index] = self._launch(index, port, how="ab", url=server.url)
        if self.moved is not None:
            self.moved.write({each.url: each.address for each in self.servers if each.address != each.url})
        return (
            f"vLLM server {server.url} {server.exit_description}{where}; restarting it, {self.restarts[server.url]} of "
            f"{self.max_restarts} times (rollout.max_restarts); log: {server.log}"
        )

    def _launch(self, index: int, port: int, how: str = "wb", url: str | None = None) -> Server:
        log = self.log_dir / f"vllm_{self.first + index}.log"
        if self.followers is not None and self.node is not None:
            self._ports = NodePorts(*free_ports(self.node.first, 2))
            self.followers.start(self._ports)
        command, environment, token = self._command(port), self._environment(index), self.token or ""
        with log.open(how) as out:
            supervisor = early_start.take(command, environment, log, token)
            if supervisor is None:
                supervisor = supervise(command, environment, out)
                give(supervisor, token)
        address = f"http://{self.host}:{port}"
        return Server(url or address, log, supervisor, time.monotonic(), address)

    def _command(self, port: int) -> list[str]:
        gpu, guarded = self.devices is not None, self.token is not None
        address = self.host, port
        return server_command(self.options, *address, gpu=gpu, guarded=guarded, node=self.node, ports=self._ports)

    def _environment(self, index: int) -> dict[str, str]:
        count, local, guarded = self.options.devices, self.host == LOOPBACK_ADDRESS, self.token is not None
        devices = None if self.devices is None else self.devices[index * count : (index + 1) * count]
        workers = self.num_servers * count
        return server_environment(self.options, devices, workers, loopback=local, guarded=guarded, node=self.node)

    def _give_up(self, server: Server, what: str) -> None:
        cause, tail = server.cause(), server.log_tail()
        self.stop()
        reason = f": {cause}. Its log: {server.log}" if cause else f". The end of its log {server.log}:\n{tail}"
        raise EngineStartError(f"vLLM server {server.url} {what}{reason}")


PORTS = range(15_000, 30_000)  # ports of servers when rollout.port is 0


def free_ports(host: str, count: int) -> list[int]:
    """Return ports that nothing listens on now. All are below 32768, from where the kernel assigns ports to outgoing
    connections of other programs, so no such connection takes one before the server listens. Raises EngineStartError
    when fewer than `count` ports are free, or when this machine does not have the address."""
    tried = random.SystemRandom().sample(PORTS, len(PORTS))
    ports = list(itertools.islice((port for port in tried if is_free(host, port)), count))
    if len(ports) < count:
        raise EngineStartError(
            f"rollout.port: {count} free ports needed on {host}, {len(ports)} found ({_bind_error(host, tried[0])})"
        )
    return ports


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen on this port now."""
    return _bind_error(host, port) is None


def check_port(host: str, port: int) -> None:
    """Raise EngineStartError when no server could listen on this port now."""
    if error := _bind_error(host, port):
        raise EngineStartError(
            f"rollout.port: {port} cannot be used on {host} ({error.strerror}); name another, or 0 to pick a free one"
        ) from error


def _bind_error(host: str, port: int) -> OSError | None:
    """Try to bind the address. Returns the error, or None when a server could listen there."""
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind((host, port))
        except OSError as error:
            return error
    return None
