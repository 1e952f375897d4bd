"""The table of docs/security.md has a row for each place of the code that opens a listening socket."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
OPENS = {
    "create_server",
    "start_server",
    "create_unix_server",
    "start_unix_server",
    "TCPSite",
    "SockSite",
    "UnixSite",
    "HTTPServer",
    "ThreadingHTTPServer",
}
ROWS = {  # file: the beginning of its row
    "megagrpo/cluster/doctor/host_checks.py": "`megagrpo doctor`",
    "megagrpo/cluster/launch/preflight.py": "the ranks' rendezvous",
    "megagrpo/engine/servers/launcher.py": "vLLM's HTTP server",  # tries the port
    "megagrpo/environments/agents/address.py": "the address of [agents]",
    "megagrpo/environments/own_judges.py": "the address of [judges]",
    "megagrpo/environments/programs/forwarder.py": "the forwarder of a container",
    "megagrpo/environments/programs/listening.py": "the address of [agents]",  # tries the interface
    "megagrpo/platform/rendezvous/store_exchange.py": "the key-value store",
    "megagrpo/rewards/sandbox/sandbox.py": "the sandbox's test",
    "megagrpo/sync/vllm_side/engine.py": "vLLM's own processes",
    "examples/trackers/prometheus.py": "the page of",
}
OF_LIBRARIES = {  # rows of sockets that torch, NCCL and vLLM open, and of what is no socket of the network
    *("gloo, between ranks", "NCCL, between ranks", "weights over p2p", "weights over shared memory"),
    *("orders to the other nodes", "reward workers"),
}


def opens(path: Path) -> bool:
    for call in [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]:
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        if name in OPENS or (name == "bind" and [type(word) for word in call.args] == [ast.Tuple]):
            return True
    return False


def test_every_listening_socket_has_a_row_in_the_table():
    files = [path for folder in ("megagrpo", "examples", "checkpoints_tools") for path in (ROOT / folder).rglob("*.py")]
    assert {str(path.relative_to(ROOT)) for path in files if opens(path)} == ROWS.keys()
    rows = re.findall(r"^\| (?!\|)([^|]+) \|", (ROOT / "docs" / "security.md").read_text().partition("\n## ")[0], re.M)
    labels = {*ROWS.values(), *OF_LIBRARIES}
    listed = [row for row in rows if not row.startswith("---")]
    assert not [label for label in labels if not any(row.startswith(label) for row in listed)]
    assert not [row for row in listed if not any(row.startswith(label) for label in labels)]
