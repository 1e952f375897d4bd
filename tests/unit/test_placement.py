"""Where servers run and which way weights take: chosen with a reason, contradictions refused with a fix."""

from pathlib import Path

import pytest

from megagrpo.config import ConfigError, load_config, weight_path
from megagrpo.plan import plan

QUICKSTART = Path(__file__).parents[2] / "configs/quickstart.yaml"
URLS = "rollout.urls=[http://10.0.0.7:8000]"


def config(*overrides):
    return load_config(QUICKSTART, overrides)


@pytest.mark.parametrize(
    ("overrides", "gpu", "one_host", "transport", "why"),
    [
        ([], False, True, "shared_memory", "everything is on one host"),
        ([], False, False, "p2p", "several hosts"),
        ([], True, True, "cuda_ipc", "the servers share the trainer's GPUs"),
        ([], True, False, "p2p", "rollout.placement is colocated, several hosts"),
        (["rollout.placement=dedicated"], True, True, "p2p", "rollout.placement is dedicated"),
        (["rollout.placement=dedicated"], False, True, "shared_memory", "everything is on one host"),
        ([URLS], True, False, "p2p", "rollout.placement is external, several hosts"),
        ([URLS, "rollout.placement=external"], False, True, "shared_memory", "everything is on one host"),
        (["rollout.weight_sync_transport=p2p"], False, True, "p2p", "rollout.weight_sync_transport says so"),
        (["rollout.weight_sync_transport=shared_memory"], True, True, "shared_memory", "rollout.weight_sync_transport says so"),
        (["lora.rank=8", "lora.sync=adapter"], True, True, "shared_memory", "lora.sync is adapter: adapters travel as files"),
    ],
)
def test_a_transport_is_chosen_for_a_reason(overrides, gpu, one_host, transport, why):
    assert weight_path(config(*overrides), gpu, one_host) == (transport, why)


@pytest.mark.parametrize(
    ("overrides", "gpu", "one_host", "message"),
    [
        (["rollout.weight_sync_transport=cuda_ipc"], False, True, "cuda_ipc needs GPUs, and there are none here; set it to auto"),
        (["rollout.weight_sync_transport=shared_memory"], True, False, "shared_memory needs all ranks and servers on one host; set it to"),
        (["lora.rank=8", "lora.sync=adapter"], True, False, "lora.sync: adapters travel as files, .* set it to merged"),
    ],
)
def test_a_transport_that_does_not_reach_the_servers_is_refused(overrides, gpu, one_host, message):
    with pytest.raises(ValueError, match=message):
        weight_path(config(*overrides), gpu, one_host)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout.placement=external"], "rollout.placement: external servers are those of rollout.urls, which is empty; name them"),
        ([URLS, "rollout.placement=colocated"], "rollout.placement: colocated servers are started here, and rollout.urls names others"),
        ([URLS, "rollout.placement=dedicated"], "rollout.placement: dedicated servers are started here, and rollout.urls names others"),
        ([URLS, "rollout.weight_sync_transport=cuda_ipc"], "and rollout.placement is external; choose p2p or auto"),
        (["rollout.placement=dedicated", "rollout.weight_sync_transport=cuda_ipc"], "and rollout.placement is dedicated; choose p2p"),
        (["lora.rank=8", "lora.sync=adapter", "rollout.weight_sync_transport=p2p"], "p2p moves weights, and lora.sync adapter sends"),
    ],
)
def test_contradictions_are_refused_with_a_fix(overrides, message):
    with pytest.raises(ConfigError, match=message):
        config(*overrides)


def test_the_plan_says_which_way_weights_take_and_why():
    both = dict(plan(config(), 1).rows)["weights"]
    assert both == "on GPUs cuda_ipc (the servers share the trainer's GPUs), without GPUs shared_memory (everything is on one host)"
    assert dict(plan(config("rollout.placement=dedicated"), 1, gpu_memory_gb=80).rows)["weights"] == "p2p (rollout.placement is dedicated)"
    named = dict(plan(config("rollout.weight_sync_transport=cuda_ipc"), 1).rows)["weights"]
    assert named.endswith("without GPUs rollout.weight_sync_transport: cuda_ipc needs GPUs, and there are none here; set it to auto")
