"""The plan of a weight sync for a config, for a thousand ranks, and for tensors that vLLM cannot cut."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ranks import run_ranks

from benchmarks.scaling import loader_slices as cuts
from benchmarks.scaling.loader_slices import EngineLayout
from benchmarks.scaling.sync_size import plan_sync, rows_of
from megagrpo.config import ParallelSection, load_config
from megagrpo.families.hf_config import load_hf_config
from megagrpo.families.shared.boxes import size
from megagrpo.families.weight_sources import shape_folder
from megagrpo.planner.costs.shapes import num_parameters

REPOSITORY = Path(__file__).parents[2]
QUICKSTART = REPOSITORY / "configs" / "quickstart.yaml"
LLAMA = dict(
    model_type="llama",
    hidden_size=576,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    intermediate_size=1536,
    vocab_size=49152,
    tie_word_embeddings=True,
)


@pytest.fixture
def folder(tmp_path):
    """A model folder of SmolLM2's shape, without weights."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


def rows(*overrides, world_size):
    return dict(rows_of(load_config(QUICKSTART, list(overrides)), world_size))


def test_the_rows_of_a_small_run(folder):
    told = run_ranks(
        rows_in_a_rank, 1, folder, "model.precision=bf16", "rollout.tp=3", "rollout.servers=2", "parallel.pp=2", 4
    )[0]
    assert told["sync"] == "4 rank(s) -> 2 server(s) of 3 worker(s), tp 3"
    # Each server gets the whole model, and two more of its workers get 61 norms of 576 elements.
    elements = 2 * (134_515_008 + 2 * 61 * 576)
    assert (
        told["moved"] == f"{elements * 2 / 1e6:.3g} MB; the workers want {elements * 2 / 1e6:.3g} MB, each element once"
    )
    assert re.match(r"\d+ of 24 rank-worker pairs; the fullest carries \d+(\.\d)? MB", told["links"])
    assert told["seconds"].startswith("0.00") and told["seconds"].endswith("is the busiest")


def test_with_a_relay_the_ranks_send_to_as_many_servers_as_they_can_feed(folder):
    words = ("rollout.tp=3", "rollout.servers=8", "parallel.pp=2")
    plain = run_ranks(rows_in_a_rank, 1, folder, *words, 6)[0]
    relayed = run_ranks(rows_in_a_rank, 1, folder, *words, "rollout.weight_sync_relay=true", 6)[0]
    assert "relay" not in plain and relayed["relay"] == "8 server(s), 2 of them from ranks; at most 4 in a chain"
    sent = [float(told["moved"].split()[0]) for told in (plain, relayed)]
    assert sent[0] == pytest.approx(4 * sent[1], rel=0.01) and plain["received"] == relayed["received"]
    assert float(relayed["seconds"].split()[0]) < 0.5 * float(plain["seconds"].split()[0])  # with the chain's fill


def test_experts_that_workers_share_out_are_planned_whole(folder):
    experts = dict(model_type="qwen3_moe", num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64, head_dim=64)
    (folder / "config.json").write_text(
        json.dumps(LLAMA | experts | dict(num_key_value_heads=9, num_attention_heads=18, vocab_size=1024))
    )
    for shared_out in ("false", "true"):
        told = run_ranks(rows_in_a_rank, 1, folder, "rollout.tp=2", f"rollout.enable_expert_parallel={shared_out}", 1)[
            0
        ]
        assert told["sync"].endswith("tp 2 x ep 2" if shared_out == "true" else "tp 2")
        slices = int(told["messages"].rpartition("from ")[2].split()[0].replace(",", ""))
        experts_sent = 30 * 8 * 3 * (1 if shared_out == "true" else 2)
        assert experts_sent < slices < experts_sent + 30 * 20


def test_stages_and_copies_of_a_server_are_planned(folder):
    experts = dict(model_type="qwen3_moe", num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64, head_dim=64)
    (folder / "config.json").write_text(json.dumps(LLAMA | experts | dict(num_attention_heads=18, vocab_size=1024)))
    whole = num_parameters(load_hf_config(shape_folder(str(folder))))
    shared = 30 * 8 * 3 * 576 * 64
    for words, workers, moved in (
        (["rollout.pp=2"], "2 worker(s), tp 1 x pp 2", whole + 1024 * 576),  # both stages need the tied embedding
        (["rollout.dp=2", "rollout.enable_expert_parallel=true"], "2 worker(s), tp 1 x ep 2", 2 * whole - shared),
    ):
        told = run_ranks(rows_in_a_rank, 1, folder, *words, "model.precision=bf16", 1)[0]
        assert told["sync"].endswith(workers) and told["moved"].startswith(f"{2 * moved / 1e6:.3g} MB")


def rows_in_a_rank(folder, *arguments):
    *overrides, world_size = arguments
    return rows(f"model.path={folder}", *overrides, world_size=world_size)


def rows_without_rules(*arguments):
    cuts.BY_ROWS.clear()
    return rows_in_a_rank(*arguments)


def test_a_tensor_without_a_sharding_rule_is_named(folder):
    with pytest.raises(Exception, match=r"self_attn\.q_proj\.weight: unknown how vLLM shards tensors of this kind"):
        run_ranks(rows_without_rules, 1, folder, 1)


@pytest.mark.full
def test_the_command_prints_the_rows(folder):
    command = [sys.executable, "-m", "benchmarks.scaling.sync_size", str(QUICKSTART), "1", f"model.path={folder}"]
    shown = subprocess.run([*command, "--link", "25"], cwd=REPOSITORY, capture_output=True, text=True).stdout
    assert "sync      1 rank(s) -> 1 server(s) of 1 worker(s), tp 1\n" in shown and "at 25 GB/s a link" in shown


def simulate():
    started = time.perf_counter()
    made = plan_sync(MODEL, LAYOUT, 1024, EngineLayout(tp=8, ep=32, servers=8), 2)
    return made, time.perf_counter() - started


MODEL = load_hf_config(shape_folder("deepseek-ai/DeepSeek-V3"))
LAYOUT = ParallelSection(tp=8, pp=16, ep=64, etp=1, pipeline_layers=[3, *[4] * 14, 2])


@pytest.mark.full
def test_a_thousand_ranks_to_256_workers_of_a_model_of_671_billion_parameters():
    made, seconds = run_ranks(simulate, 1)[0]
    moved = made.transfers
    # Each of 8 servers gets the model once; other weights than experts once per data-parallel copy or worker.
    parameters = num_parameters(MODEL)
    assert parameters // 10**9 == 671 and 8 * parameters < moved.total == made.wanted < 1.3 * 8 * parameters
    received = moved.received(256)
    assert received.max() / received.mean() < 1.01
    sent = moved.sent(1024)
    assert sent.sum() == moved.total and sent.max() / sent.mean() < 1.15
    assert sum(size(moved.boxes[box]) for box in moved.box.tolist()) == moved.total
    assert seconds < 60
