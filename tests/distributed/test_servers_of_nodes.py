"""The servers of several nodes: every rank learns of all of them, or that a node failed; no rank waits for another."""

import os
from contextlib import ExitStack
from pathlib import Path

import pytest
from ranks import run_ranks
from suites import usual

from megagrpo.config import ParallelSection, load_config
from megagrpo.engine.servers.options import ServerOptions
from megagrpo.platform.parallel.layout import init_layout
from megagrpo.trainer.engine_side import NodeServers, await_all
from tests.unit.engine.servers.test_restarts import Stand

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


def found(folder: Path, failing: str):
    """What a rank, the first of its node, gets: (the index of every URL's node, this rank's URLs, whether it sees all
    launchers), or its error."""
    layout = init_layout(ParallelSection())
    rank, log_dir = layout.world_rank, folder / f"node{layout.world_rank}"
    log_dir.mkdir()
    (log_dir / "config.json").write_text("{}")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="9")
    if failing == f"server of node {rank}":
        (log_dir / "broken").touch()
    if failing == f"address of node {rank}":
        del os.environ["MASTER_ADDR"]
    with Stand(ServerOptions(str(log_dir), "float32", 64), log_dir) as launcher, ExitStack() as resources:
        launcher.start()
        if failing == f"agent of node {rank}":
            launcher.restarts = None  # the agent cannot publish its servers
        try:
            servers = NodeServers((0, 1), launcher, "token")
            nodes, launchers, urls = await_all(servers, load_config(QUICKSTART).rollout, layout, print, resources)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return [nodes.servers[url] for url in urls], launcher.urls, launchers is not None


def test_every_rank_learns_of_the_servers_of_all_nodes_and_rank_0_controls_them(tmp_path):
    first, second = run_ranks(found, 2, tmp_path, "")
    assert first[0] == second[0] == [0, 1] and first[1] != second[1]
    assert first[2] and not second[2]


@pytest.mark.parametrize(
    ("failing", "rank", "error"),
    usual(
        [
            ("server of node 1", 1, "EngineStartError"),
            ("agent of node 1", 1, "TypeError"),
            ("address of node 0", 0, "KeyError"),
        ],
        0,
        1,
    ),
    ids=str,
)
def test_a_failure_on_one_node_is_an_error_on_every_rank(failing, rank, error, tmp_path):
    errors = run_ranks(found, 2, tmp_path, failing)
    assert errors[rank].startswith(error)
    assert errors[1 - rank].startswith(f"RankError: rank {rank}: {error}")
