"""Rollouts in FP8: every sync quantizes again, exactly as a server that loads the folder does. The metrics show the
quantization error."""

import statistics

import httpx
import pytest
from ranks import run_ranks

from megagrpo.config import ParallelSection
from megagrpo.engine.http.probe import check_plugin
from megagrpo.platform.parallel.layout import init_layout
from megagrpo.sync.trainer_side.point_to_point import PointToPoint
from megagrpo.sync.trainer_side.sync import WeightSync
from megagrpo.sync.trainer_side.transport import TransportSettings
from megagrpo.types import WeightSyncError
from tests.e2e import world
from tests.e2e.test_weight_sync import OneRank, Tampered, is_paused, without
from tests.e2e.tiny_servers import Running, connect, launch, model_folder, sampled, shards

FP8 = "fp8_per_channel"
CORRECTED = ["algorithm.importance_correction=token_truncate", "algorithm.importance_correction_max=2"]


@pytest.fixture(scope="module")
def pair():
    """A server to be synced and a fresh one on other weights, both in FP8."""
    yield from two_servers(tp=1)


def two_servers(tp: int):
    folders = model_folder("llama", 0), model_folder("llama", 1)
    launchers = [
        launch(folder, f"fp8_tp{tp}_{folder.name}", dtype="bfloat16", quantization=FP8, tp=tp) for folder in folders
    ]
    yield tuple(connect(launcher, folder) for launcher, folder in zip(launchers, folders, strict=True))
    for launcher in launchers:
        launcher.stop()


def pushed(sync: WeightSync, running: Running, folder) -> list:
    """The server's responses once it has the weights of `folder`."""
    sync.push(shards(folder), running.engine.weight_version + 1)
    return sampled(running.engine)


@pytest.mark.full
def test_every_sync_quantizes_as_a_server_does_that_loads_the_folder(pair):
    synced, fresh = pair
    old, new = sampled(synced.engine), sampled(fresh.engine)
    assert old != new
    # the loaders run once; later updates replay their copies
    with WeightSync(synced.engine, OneRank(), "bfloat16") as sync:
        assert [
            pushed(sync, synced, folder) == now for folder, now in ((fresh.folder, new), (synced.folder, old)) * 2
        ] == [True] * 4


@pytest.mark.full
def test_an_update_that_fails_leaves_quantized_weights_that_the_next_one_replaces(pair):
    synced, fresh = pair
    new, version = sampled(fresh.engine), synced.engine.weight_version + 1
    with WeightSync(
        Tampered(synced.engine, without("model.layers.1.mlp.up_proj.weight")), OneRank(), "bfloat16"
    ) as sync:
        with pytest.raises(
            WeightSyncError, match=r"only part of the weights received for model\.layers\.1\.mlp\.gate_up_proj"
        ):
            sync.push(shards(fresh.folder), version)
        assert is_paused(synced.engine)
        sync.push(shards(fresh.folder), version)
    assert sampled(synced.engine) == new


@pytest.mark.full
def test_a_server_that_no_ranks_send_weights_to_gets_its_quantized_ones_back(pair):
    engine = pair[0].engine
    before = sampled(engine)
    for verb in ("pause?mode=wait", "start_weight_update", "finish_weight_update", "resume"):
        assert httpx.post(f"{engine.urls[0]}/{verb}", timeout=30).status_code == 200
    assert sampled(engine) == before


def push_straight(engine, folders: list, version: int) -> None:
    layout = init_layout(ParallelSection(tp=2))
    transport = PointToPoint(layout, "bfloat16", TransportSettings(seconds=60, megabytes=0.05))
    with WeightSync(engine if layout.world_rank == 0 else None, layout, "bfloat16", transport) as sync:
        for number, folder in enumerate(folders):
            sync.push(shards(folder, parts=2, part=layout.world_rank), version + number)
    layout.close()


@pytest.mark.full
def test_weights_that_ranks_send_to_its_workers_are_quantized_as_well(pair):
    synced, fresh = pair
    version = synced.engine.weight_version + 1
    run_ranks(push_straight, 2, synced.engine, [fresh.folder, synced.folder, fresh.folder], version)
    synced.engine.weight_version = version + 2  # the ranks are forks and have their own client
    assert sampled(synced.engine) == sampled(fresh.engine)


@pytest.fixture(scope="module")
def pair_of_two_workers():
    """Like `pair`, with two workers per server, which agree on the scales of the parameters that they share."""
    yield from two_servers(tp=2)


@pytest.mark.full
def test_two_workers_agree_on_scales_at_every_sync(pair_of_two_workers):
    synced, fresh = pair_of_two_workers
    new, engine = sampled(fresh.engine), synced.engine
    assert sampled(engine) != new
    with WeightSync(engine, OneRank(), "bfloat16") as sync:
        assert pushed(sync, synced, fresh.folder) == new
        assert pushed(sync, synced, synced.folder) != new
        assert pushed(sync, synced, fresh.folder) == new
    version = engine.weight_version + 1
    run_ranks(push_straight, 2, engine, [synced.folder, fresh.folder], version)
    engine.weight_version = version + 1
    assert sampled(engine) == new


@pytest.mark.full
def test_a_run_asks_whether_its_servers_were_started_so(pair):
    urls = pair[0].engine.urls
    check_plugin(urls, quantization=FP8)
    with pytest.raises(
        ValueError, match=f"rollout.quantization: none differs from {urls[0]}, which was started with {FP8}"
    ):
        check_plugin(urls)


@pytest.mark.full
def test_training_on_rollouts_in_fp8_shows_in_its_metrics(tmp_path):
    run = world.train(tmp_path, f"rollout.quantization={FP8}", "run.max_steps=3", *CORRECTED, launched=True)
    assert run.code == 0 and len(run.metrics) == 3, run.err
    assert f"; vLLM quantizes to {FP8}" in run.out and "quantizes" not in world.plain().out
    near, apart = (
        statistics.fmean(line["token_mult_prob_error"] for line in one.metrics) - 1 for one in (world.plain(), run)
    )
    assert near < 1e-3 < 5e-3 < apart < 0.1, "FP8 rounds weights and activations to 3 bits, float32 to 23"
    assert all(line["gen_kl_error"] > 0 for line in run.metrics)
    assert any(line["sampling/importance_sampling_ratio/mean"] != 1 for line in run.metrics)


@pytest.mark.full
def test_training_adapters_on_a_base_that_servers_keep_in_fp8(tmp_path):
    lora = ("lora.rank=4", "lora.alpha=64", "train.learning_rate=5e-3", "lora.sync=adapter")
    run = world.train(tmp_path, f"rollout.quantization={FP8}", *CORRECTED, *lora, launched=True)
    assert run.code == 0, run.err
    assert (
        all(1.02 < line["token_mult_prob_error"] < 1.15 for line in run.metrics)
        and run.metrics[-1]["weight_version"] == 3
    )
