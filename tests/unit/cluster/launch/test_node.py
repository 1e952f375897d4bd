"""megagrpo/cluster/launch/node.py: output of ranks, and waiting for servers. tests/slurm runs it on two nodes."""

import http.server
import os
import socket
import threading
from pathlib import Path
from unittest.mock import patch

import pytest

from megagrpo.cluster.launch import local, node


def test_every_rank_has_a_file_named_by_its_number_and_the_first_is_printed(tmp_path):
    envs = {0: {"RANK": "8"}, 1: {"RANK": "9"}}
    files = {0: str(tmp_path / "logs" / "rank_00008.log"), 1: str(tmp_path / "logs" / "rank_00009.log")}
    second = node.RankLogs(tmp_path / "logs").reify(envs)
    assert second.stdouts == second.stderrs == files and second.tee_stdouts == {}
    assert (tmp_path / "logs").is_dir() and envs[0]["TORCHELASTIC_ERROR_FILE"] != envs[1]["TORCHELASTIC_ERROR_FILE"]
    first = node.RankLogs(tmp_path / "logs").reify({0: {"RANK": "0"}})
    assert first.tee_stdouts == first.stdouts


class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" and self.server.well else 503)
        self.end_headers()

    def log_message(self, *words): ...


def test_servers_that_do_not_answer_in_time_are_named(capsys):
    server = http.server.HTTPServer(("127.0.0.1", 0), Healthy)
    server.well = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    up = f"http://127.0.0.1:{server.server_address[1]}"
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        down = f"http://127.0.0.1:{closed.getsockname()[1]}"
        assert node.wait_until_healthy([up], 5) == [] and node.wait_until_healthy([], 5) == []
        words = [
            "--nodes",
            "1",
            "--ranks",
            "1",
            "--master",
            "127.0.0.1:1",
            "--wait-for",
            f"{up},{down}",
            "--wait-seconds",
            "0.5",
        ]
        assert node.main(words) == 1
        server.well = False
        assert node.wait_until_healthy([up], 0.5) == [up]
    server.shutdown()
    assert capsys.readouterr().err == f"no response from {down} within 0.5 s (rollout.startup_timeout)\n"


@pytest.mark.parametrize(("layout", "value"), [("parallel.tp=2", "1"), ("parallel.cp=2", "1"), ("parallel.pp=2", None)])
def test_ranks_of_a_job_get_one_connection_where_the_layout_needs_it(layout, value, monkeypatch):
    monkeypatch.setattr(local, "visible_gpu_lines", lambda environment: ["GPU 0: NVIDIA H100"])
    started = []
    monkeypatch.setattr(node, "run_ranks", lambda *words: started.append((words, dict(os.environ))) or 0)
    config = str(Path(__file__).parents[4] / "configs" / "quickstart.yaml")
    with patch.dict(os.environ, {"OMP_NUM_THREADS": "1"}):  # what the command sets goes with it
        os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
        assert node.main(["--nodes", "2", "--ranks", "8", "--master", "10.0.0.1:29400", config, layout]) == 0
    ((_, command, nodes, _), environment) = started[0]
    assert nodes.num_nodes == 2 and command == ["megagrpo", "train", config, layout]
    assert environment.get("CUDA_DEVICE_MAX_CONNECTIONS") == value


def test_a_job_whose_config_is_invalid_ends_with_its_problem(capsys):
    config = str(Path(__file__).parents[4] / "configs" / "quickstart.yaml")
    assert node.main(["--nodes", "1", "--ranks", "1", "--master", "10.0.0.1:29400", config, "parallel.tq=2"]) == 2
    assert "parallel.tq" in capsys.readouterr().err
