"""Predicted seconds: against sums by hand, against the exact plan of a sync, and checked for monotonicity."""

import importlib.util
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from ranks import run_ranks

import megagrpo
from benchmarks.scaling.loader_slices import EngineLayout
from benchmarks.scaling.step_memory import ROLLOUT_BYTES, planned_step_memory
from megagrpo.__main__ import main
from megagrpo.config import ConfigError, RunConfig, load_config
from megagrpo.families.hf_config import parse_hf_config
from megagrpo.planner import plan, with_times
from megagrpo.planner.costs.engine_memory import ServerMemory
from megagrpo.planner.costs.flops import attention_flops, model_flops, step_flops, token_flops
from megagrpo.planner.costs.gpu_specs import GPUS, LINK_EFFICIENCY, Links
from megagrpo.planner.costs.planned_memory import activation_elements, smallest_gpu, trainer_memory
from megagrpo.planner.costs.shapes import num_parameters
from megagrpo.planner.costs.workload import Lengths, average_bundle, expected_lengths, step_samples
from megagrpo.planner.plan_text import rows_of, times_table
from megagrpo.planner.times import layout_search
from megagrpo.planner.times.generation_times import (
    DECODE_BANDWIDTH,
    DECODE_STEP_SECONDS,
    LAYER_SECONDS,
    Generation,
    exponential_mean,
)
from megagrpo.planner.times.layout_search import USABLE, USABLE_WITH_EXPERTS, _cost, search, splits_of
from megagrpo.planner.times.pass_times import (
    ATTENTION_EFFICIENCY,
    BANDWIDTH,
    DENSE_EFFICIENCY,
    IMBALANCE,
    LAYER_STARTS,
    TOUCHES,
    fill,
    pass_seconds,
)
from megagrpo.planner.times.step_times import (
    READ_TOKEN_SECONDS,
    REQUEST_SECONDS,
    control_seconds,
    route_bytes,
    step_times,
    sync_parts,
    sync_seconds,
)

REPOSITORY = Path(__file__).parents[3]
H100 = GPUS["h100"]
LLAMA_8B = dict(
    model_type="llama", hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8
)
LLAMA_8B |= dict(intermediate_size=14336, vocab_size=128256, max_position_embeddings=131072, tie_word_embeddings=False)
MODEL = parse_hf_config(LLAMA_8B)
DEEPSEEK = REPOSITORY / "configs" / "models" / "deepseek-ai" / "DeepSeek-V3"
BF16_HALF = f"model.bf16_layers={list(range(16))}"
LENGTHS = Lengths(200, 800, 1600)


def config(*overrides: str):
    """The config of Llama-3.1-8B: 64 x 16 samples a step, on 80 GB."""
    sizes = [
        "model.precision=bf16",
        "rollout.prompts_per_step=64",
        "rollout.num_generations=16",
        "rollout.max_prompt_length=448",
    ]
    sizes += [
        "rollout.max_completion_length=1600",
        "train.max_tokens_per_micro_batch=4096",
        "train.distributed_optimizer=true",
    ]
    return load_config(REPOSITORY / "configs" / "quickstart.yaml", [*sizes, *overrides])


def seconds(*overrides: str, world: int = 8, lengths: Lengths = LENGTHS, gpu: str = "h100") -> dict[str, float]:
    return step_times(config(*overrides), MODEL, world, GPUS[gpu], lengths).seconds


def test_fp8_shortens_what_linears_take_and_is_refused_where_the_gpu_has_none():
    bf16, fp8, half = (
        seconds(*keys)["train"]
        for keys in ([], ["model.fp8_recipe=blockwise"], ["model.fp8_recipe=blockwise", BF16_HALF])
    )
    assert bf16 / 1.5 < fp8 < half < bf16 and half == pytest.approx((bf16 + fp8) / 2)
    assert seconds("model.fp8_recipe=tensorwise")["generate"] == seconds()["generate"]
    made = plan(config("model.fp8_recipe=mxfp8"), 8)
    for gpu, said in {
        "a100": "choose none",
        "h100": "choose none, tensorwise or blockwise",
        "b200": None,
    }.items():
        settings = config("model.fp8_recipe=mxfp8")
        found = with_times(made, settings, 8, GPUS[gpu], LENGTHS)
        refused = list(map(str, found.problems[len(made.problems) :]))
        assert refused == ([f"model.fp8_recipe: mxfp8 does not run on {gpu}; {said}"] if said else [])
        assert (found.times is None) == bool(said)


def test_activations_on_their_way_to_the_host_are_waited_for_as_far_as_they_take_longer_than_the_pass():
    stay, half, leave = (seconds(f"model.offload_activations={share}")["train"] for share in (0, 0.5, 1))
    assert stay < half < leave and seconds("model.offload_activations=1")["logprobs"] == seconds()["logprobs"]
    again, little = (seconds("model.recompute=full", f"model.offload_activations={share}")["train"] for share in (0, 1))
    assert again == little  # only the input of each layer


def test_kernels_are_refused_on_gpus_that_they_are_not_for():
    settings = config("train.fused_logprobs=true")
    made = plan(settings, 8)
    plans = {gpu: with_times(made, settings, 8, GPUS[gpu], LENGTHS) for gpu in GPUS}
    said = {gpu: list(map(str, plans[gpu].problems[len(made.problems) :])) for gpu in GPUS}
    refused = {
        gpu: [f"train.fused_logprobs: true needs a Hopper GPU, but the GPU is {gpu}; set it to false"]
        for gpu in ("a100", "b200")
    }
    assert said == refused | {"h100": [], "h200": []}


def test_flops_are_those_of_the_products_of_one_token():
    h, layers, kv, mlp, vocab = 4096, 32, 1024, 14336, 128256
    flops = token_flops(MODEL)
    products = layers * (2 * h * h + 2 * h * kv + 3 * h * mlp)
    # norms count too, and are negligible
    assert flops.dense == pytest.approx(2 * products, rel=1e-4) and flops.experts == 0
    assert flops.head == 2 * h * vocab
    scores = sum(2 * 2 * 128 * 32 * (place + 0.5) for place in range(300))  # a query sees half of its own key
    assert attention_flops(MODEL, 300) == pytest.approx(layers * scores)
    gradients_of_weights = 300 * flops.dense + 200 * flops.head
    assert model_flops(MODEL, 100, 200) - model_flops(MODEL, 100, 200, frozen=True) == pytest.approx(
        gradients_of_weights
    )
    assert model_flops(MODEL, 100, 200) == pytest.approx(
        3 * (300 * flops.dense + 200 * flops.head + attention_flops(MODEL, 300))
    )


def test_a_window_bounds_the_scores():
    gemma = dict(
        model_type="gemma3_text", head_dim=64, sliding_window=100, layer_types=["sliding_attention", "full_attention"]
    )
    model = parse_hf_config(
        LLAMA_8B | gemma | dict(num_hidden_layers=2, query_pre_attn_scalar=64, tie_word_embeddings=True)
    )
    pairs = sum(min(place + 0.5, 100) for place in range(1000)) + 1000**2 / 2
    assert attention_flops(model, 1000) == pytest.approx(2 * pairs * 32 * 2 * 64, rel=1e-3)


def test_experts_count_as_many_as_a_token_meets():
    flops = token_flops(parse_hf_config(json.loads((DEEPSEEK / "config.json").read_text())))
    assert flops.experts == 2 * 58 * 8 * 3 * 7168 * 2048
    # DeepSeek-V3, arXiv 2412.19437: 37B activated
    assert (flops.blocks + flops.head) / 2 == pytest.approx(37e9, rel=0.03)


@pytest.mark.parametrize("shared", [False, True])
def test_a_pass_is_its_products_its_attention_and_the_memory_that_layers_touch_and_recomputing_costs_one_more(
    shared,
):
    flops, peak, memory = token_flops(MODEL), H100.bf16_tflops * 1e12, H100.memory_gb_per_s * 1e9 * BANDWIDTH
    settings, tokens = config(f"train.share_prompts={str(shared).lower()}"), 1024 * (850 if shared else 1000)
    products = tokens * flops.dense / DENSE_EFFICIENCY / peak
    # four responses share a prompt in 4096 tokens, and each sees all of it
    again = 0.75 * attention_flops(MODEL, 200) if shared else 0
    attention = 1024 * (attention_flops(MODEL, 1000) - again) / ATTENTION_EFFICIENCY / peak
    traffic = tokens * TOUCHES * 32 * activation_elements(settings, MODEL, gpu=True)[0] * 2 / memory
    head = 1024 * 800 * flops.head / DENSE_EFFICIENCY / peak
    passes = pass_seconds(settings, MODEL, 1, H100, LENGTHS)
    assert passes.bubble == 0 and passes.forward == pytest.approx(products + attention + traffic + head)
    assert passes.backward == pytest.approx(2 * passes.forward)
    layers = products + attention + traffic
    extra = {
        how: pass_seconds(
            config(f"train.share_prompts={str(shared).lower()}", f"model.recompute={how}"), MODEL, 1, H100, LENGTHS
        ).backward
        - passes.backward
        for how in ("full", "selective")
    }
    assert extra == pytest.approx({"full": layers, "selective": attention})


@pytest.mark.parametrize(
    ("keys", "responses", "tokens"),
    [
        ([], 4, 850),  # (4096 - 200) / 800 responses fit
        (["train.max_tokens_per_micro_batch=9000"], 8, 825),  # 11 fit, so two micro-batches share 16
        (["train.max_tokens_per_micro_batch=13000"], 16, 812.5),
        (["train.max_tokens_per_micro_batch=2048"], 2, 900),
        (["parallel.cp=2"], 1, 1000),  # Transformer Engine's ring shares none
        (["model.fusions=[rope]"], 1, 1000),
        (["train.share_prompts=false"], 1, 1000),
    ],
)
def test_a_shared_prompt_is_computed_once_in_a_micro_batch(keys, responses, tokens):
    settings = config(*keys)
    bundle = average_bundle(settings, LENGTHS)
    assert (bundle.responses, bundle.tokens_per_response) == (responses, tokens)
    times = step_times(settings, MODEL, 8, H100, LENGTHS)
    # the FLOPs that the metric `mfu` counts for the same bundle
    spans = np.array([(0, 200), *[(200, 1000)] * responses] if responses > 1 else [(0, 1000)])
    flops = 1024 / responses * step_flops(MODEL, spans, 800 * responses)
    assert times.mfu == pytest.approx(flops / (times.seconds["train"] * 8 * H100.bf16_tflops * 1e12))


def test_the_measured_seconds_of_shared_prompts_are_predicted_within_fifteen_percent():
    """Four steps of one H200 (benchmarks/RESULTS.md): seconds of train and of log-probs."""
    train_step = importlib.import_module("benchmarks.gpu.train_step")
    long = "rollout.max_prompt_length=2048", "rollout.max_completion_length=1024"
    measured = {((), False): (1.341, 0.459), ((), True): (1.132, 0.383)}
    measured |= {(long, False): (1.858, 0.630), (long, True): (0.861, 0.281)}
    for (keys, shared), seconds in measured.items():
        shape = train_step.shape("7b", 8)
        made = train_step.run_config("none", *keys, f"train.share_prompts={str(shared).lower()}")
        case = train_step.Case("7b", parse_hf_config(shape), made, train_step.sizes_of(made))
        assert case.predicted(GPUS["h200"])[:2] == pytest.approx(seconds, rel=0.15), (keys, shared)


def test_the_measured_seconds_of_128_experts_are_predicted_within_thirty_percent():
    """One H200, one kernel for the products of all experts (benchmarks/RESULTS.md): seconds of train and of log-probs."""
    train_step = importlib.import_module("benchmarks.gpu.train_step")
    made = train_step.run_config("none", "train.share_prompts=false")
    case = train_step.Case("30b-a3b", parse_hf_config(train_step.shape("30b-a3b", 8)), made, train_step.sizes_of(made))
    assert case.predicted(GPUS["h200"])[:2] == pytest.approx((1.371, 0.400), rel=0.3)


def test_short_micro_batches_take_as_long_as_their_kernels_take_to_start():
    tiny = config(
        "train.max_tokens_per_micro_batch=256", "rollout.max_prompt_length=20", "rollout.max_completion_length=100"
    )
    passes = pass_seconds(tiny, MODEL, 1, GPUS["b200"], Lengths(20, 100, 100))
    count = math.ceil(1024 * 120 / (256 * fill(tiny, Lengths(20, 100, 100))))
    assert passes.forward == pytest.approx(count * 32 * LAYER_STARTS, rel=0.1) and passes.backward == pytest.approx(
        passes.forward, rel=0.1
    )


def test_half_a_sample_is_left_over_in_a_micro_batch_or_all_but_one():
    settings = config("train.share_prompts=false")
    assert (
        fill(settings, Lengths(200, 3000, 3800)) == 3200 / 4096
        and fill(settings, Lengths(200, 800, 1600)) == 1 - 1000 / 4096 / 2
    )
    # whole bundles: a prompt with four responses in a budget of 4096, with 16 short ones in half of it
    assert fill(config(), LENGTHS) == 3400 / 4096 and fill(config(), Lengths(200, 80, 160)) == 1 - 1480 / 4096 / 2


def test_ranks_that_share_experts_out_wait_for_the_fullest_micro_batch_and_the_fullest_experts():
    mixed = dict(
        model_type="qwen3_moe",
        head_dim=128,
        num_experts=64,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        norm_topk_prob=True,
    )
    model = parse_hf_config(LLAMA_8B | mixed)
    alone, shared = (pass_seconds(config(f"parallel.ep={ep}"), model, 8, H100, LENGTHS).forward for ep in (1, 8))
    assert shared > alone / fill(config(), LENGTHS) and IMBALANCE > 1


def test_decoding_reads_weights_and_cache_until_the_longest_is_done():
    """One server, all responses of the same length."""
    lengths = Lengths(200, 1600, 1600)
    one = seconds(
        "rollout.placement=dedicated",
        "rollout.max_num_seqs=2000",
        "rollout.gpu_memory_utilization=1",
        lengths=lengths,
        gpu="b200",
    )
    gpu, cache = GPUS["b200"], 2 * 2 * 32 * 1024
    naive = sum(
        (2 * 8.03e9 + 1024 * cache * (200 + place)) / (gpu.memory_gb_per_s * 1e9 * DECODE_BANDWIDTH)
        for place in range(1600)
    )
    naive += 1600 * (DECODE_STEP_SECONDS + 32 * LAYER_SECONDS)
    slots = int((gpu.memory_gib * 2**30 - 2 * 8.03e9) / (1800 * cache))
    assert slots < 1024  # so some wait, and every step has a full batch
    assert one["generate"] > naive * 0.9
    small = seconds("rollout.placement=dedicated", "rollout.prompts_per_step=1", lengths=lengths, gpu="b200")[
        "generate"
    ]
    naive = sum(
        (2 * 8.03e9 + 16 * cache * (200 + place)) / (gpu.memory_gb_per_s * 1e9 * DECODE_BANDWIDTH)
        for place in range(1600)
    )
    assert small == pytest.approx(naive + 1600 * (DECODE_STEP_SECONDS + 32 * LAYER_SECONDS), rel=0.01)


def test_stages_of_a_server_make_room_and_tensor_parallelism_also_saves_reading():
    one, tensors, stages = (seconds(*words)["generate"] for words in ([], ["rollout.tp=2"], ["rollout.pp=2"]))
    assert tensors < stages < one
    assert seconds("rollout.pp=2")["sync"] < seconds()["sync"]  # a worker receives half of the weights


def test_stragglers_make_generation_longer_than_the_average_response():
    same, spread = (
        seconds("rollout.servers=8", lengths=Lengths(200, 800, longest))["generate"] for longest in (800, 3200)
    )
    assert spread > 1.5 * same
    few, many = (
        seconds(f"rollout.prompts_per_step={8 * n}", f"rollout.servers={n}", lengths=Lengths(200, 100, 1600))[
            "generate"
        ]
        for n in (1, 8)
    )
    assert few < many < 1.6 * few  # with more responses the longest is longer, and it ends before the maximum
    mean = exponential_mean(800, 1600)
    survival = sum(math.exp(-(i + 0.5) / mean) for i in range(1600))
    assert survival == pytest.approx(800, rel=1e-3) and exponential_mean(1600, 1600) == 0


@pytest.mark.parametrize(
    ("worse", "better", "phase"),
    [
        (["parallel.pp=8"], ["parallel.pp=8", "parallel.vpp=2"], "train"),  # the bubble
        (["parallel.tp=8", "parallel.sequence_parallel=true"], [], "train"),  # all-reduces in every layer
        (["parallel.cp=4"], [], "train"),
        (["algorithm.num_iterations=2"], [], "logprobs"),  # needs old log-probs
        (["algorithm.beta=0.1"], [], "logprobs"),
        (["algorithm.steps_per_generation=4"], [], "train"),  # more updates
        (["train.optimizer_offload=true"], [], "train"),
        ([], ["lora.rank=8"], "train"),
        ([], ["rollout.servers=8"], "generate"),
        ([], ["rollout.tp=2"], "generate"),
        (["rollout.max_num_seqs=16"], [], "generate"),
        (["rollout.placement=dedicated"], ["train.offload=false"], "sync"),  # over the network
        ([], ["train.offload=false"], "sync"),  # to the host and back
        ([], ["parallel.tp=4", "parallel.sequence_parallel=true"], "load"),
    ],
)
def test_settings_cost_what_they_cost(worse, better, phase):
    assert seconds(*worse)[phase] > seconds(*better)[phase]


def test_what_no_step_changes_is_copied_to_the_host_once_and_back_in_every_step():
    def copied(*overrides: str) -> float:
        """Bytes of a step, computed from the seconds that they take."""
        stays = seconds("parallel.tp=8", "parallel.sequence_parallel=true", "train.offload=false", *overrides)["sync"]
        return 25e9 * (seconds("parallel.tp=8", "parallel.sequence_parallel=true", *overrides)["sync"] - stays)

    weights, frozen = 2 * num_parameters(MODEL) / 8, copied("lora.rank=8")
    follows = ("algorithm.sync_ref_model=true", "algorithm.ref_model_sync_steps=10")
    still, moves = (copied("algorithm.beta=0.1", *keys) - copied() for keys in ((), follows))
    # bf16, float32 masters and moments, both ways
    assert copied() == pytest.approx(2 * (2 + 12) / 2 * weights, rel=0.01)
    assert still == pytest.approx(weights, rel=0.01) and moves == pytest.approx(1.1 * weights, rel=0.01)
    assert weights < frozen < 1.2 * weights  # adapters, their masters and moments both ways


@pytest.mark.parametrize(("slow", "fast"), [("a100", "h100"), ("h100", "h200"), ("h200", "b200")])
def test_newer_gpus_are_faster(slow, fast):
    assert (
        seconds(gpu=slow)["generate"] > seconds(gpu=fast)["generate"]
        and seconds(gpu=slow)["train"] >= seconds(gpu=fast)["train"]
    )


def test_links_carry_bytes_at_their_speed_and_the_network_is_slower():
    links = Links(H100)
    assert links.reduce_scatter(1e9, 8) == pytest.approx(1e9 * 7 / 8 / (450e9 * LINK_EFFICIENCY), rel=0.02)
    assert links.reduce_scatter(1e9, 16) == pytest.approx(1e9 * 15 / 16 / (50e9 * LINK_EFFICIENCY), rel=0.02)
    assert links.latency(8) < links.latency(16) < links.latency(64) and links.all_reduce(1e9, 1) == 0
    assert links.all_reduce(1e9, 8) == pytest.approx(2 * links.reduce_scatter(1e9, 8), rel=0.01)
    assert links.reduce_scatter(1e9, 1) == links.all_to_all(1e9, 1) == 0
    assert links.all_to_all(1e9, 16) == pytest.approx(1e9 * 8 / 16 / (50e9 * LINK_EFFICIENCY), rel=0.02)


def test_the_sum_for_a_sync_is_that_of_its_exact_plan():
    from benchmarks.scaling.sync_size import plan_sync

    settings = config(
        "rollout.placement=dedicated",
        "parallel.tp=2",
        "parallel.sequence_parallel=true",
        "rollout.servers=2",
        "rollout.tp=2",
    )
    (exact,) = run_ranks(plan_sync, 1, MODEL, settings.parallel, 8, EngineLayout(tp=2, ep=1, servers=2), 2)
    assert sync_seconds(sync_parts(settings, MODEL, 8, H100)) == pytest.approx(
        exact.seconds(H100.network_gb_per_s * LINK_EFFICIENCY)[0], rel=0.1
    )


def test_generation_that_runs_ahead_keeps_every_slot_taken_and_a_response_has_as_many_steps_as_it_may_be_old():
    """A step's last responses run together with the next step's, unless a sync waits for them."""
    keys = ["rollout.placement=dedicated", "rollout.servers=8", "algorithm.importance_correction=token_truncate"]
    keys.append("algorithm.importance_correction_max=2")
    spread = Lengths(200, 300, 1600)
    waits, ahead, wait, far = (
        seconds(*keys, *more, lengths=spread)["generate"]
        for more in (
            [],
            ["rollout.max_staleness=1"],
            ["rollout.max_staleness=1", "rollout.in_flight=wait"],
            ["rollout.max_staleness=8"],
        )
    )
    assert wait == waits and 0.4 * waits < ahead < 0.8 * waits and far < ahead


def test_waiting_for_the_other_side_is_idle_time_and_all_gpus_count():
    apart = step_times(config("rollout.placement=dedicated", "rollout.servers=8"), MODEL, 8, H100, LENGTHS)
    together = step_times(config("rollout.servers=8"), MODEL, 8, H100, LENGTHS)
    assert (apart.gpus, together.gpus) == (16, 8)
    assert together.idle == pytest.approx(together.seconds["control"] / together.step)  # GPUs wait for their hosts
    alone = step_times(config("rollout.servers=2"), MODEL, 8, H100, LENGTHS)  # six GPUs generate nothing
    idle = 6 / 8 * alone.seconds["generate"] + alone.seconds["control"]
    assert alone.idle == pytest.approx(idle / alone.step)
    working = 8 * apart.seconds["generate"] + 8 * apart.seconds["train"]
    assert apart.idle == pytest.approx(1 - (working + 16 * apart.seconds["sync"]) / (16 * apart.step))
    assert apart.tokens_per_gpu == pytest.approx(1024 * 1000 / apart.step / 16)
    adapters = step_times(config("rollout.servers=8", "lora.rank=8"), MODEL, 8, H100, LENGTHS)
    assert 0.3 < adapters.mfu < DENSE_EFFICIENCY and 0.3 < together.mfu < DENSE_EFFICIENCY
    correction = ["algorithm.importance_correction=token_truncate", "algorithm.importance_correction_max=2"]
    running_ahead = config("rollout.placement=dedicated", "rollout.servers=8", "rollout.max_staleness=1", *correction)
    ahead = step_times(running_ahead, MODEL, 8, H100, LENGTHS)
    longer, shorter = sorted((ahead.seconds["generate"], ahead.seconds["train"]), reverse=True)
    control = apart.seconds["control"]
    assert ahead.seconds["train"] == apart.seconds["train"] and ahead.step == pytest.approx(
        longer + apart.seconds["sync"] + control
    )
    assert ahead.idle == pytest.approx((8 * (longer - shorter) + 16 * control) / (16 * ahead.step))
    staged = step_times(config("parallel.pp=8", "rollout.servers=8"), MODEL, 8, H100, LENGTHS)
    assert staged.bubble == pytest.approx(7 / (7 + math.ceil(1024 * 850 / 4096 / fill(config(), LENGTHS))))
    waits = staged.bubble * staged.seconds["train"] + staged.seconds["control"]
    assert staged.idle == pytest.approx(waits / staged.step, rel=0.02)


@pytest.mark.parametrize("world", [pytest.param(4, marks=pytest.mark.full), 8])
def test_the_search_finds_layouts_that_fit_and_none_is_slower_than_the_configs_own(tmp_path, world):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    kept = [f"model.path={tmp_path}", "rollout.placement=dedicated"]
    own = config(*kept, "parallel.tp=2", "parallel.pp=2", "parallel.sequence_parallel=true", "model.recompute=full")
    assert plan(own, world, 79).problems == []
    found = search(own, MODEL, world, H100, LENGTHS)
    assert len(found) == 5 and found[0].times.step <= step_times(own, MODEL, world, H100, LENGTHS).step
    for one in found:
        changed, ranks = config(*kept, *one.overrides), one.world_size
        memory = trainer_memory(changed, MODEL, ranks // changed.parallel.model_parallel_size)
        server = ServerMemory.of(changed, MODEL)
        assert plan(changed, ranks, 79).problems == [] and one.gib <= USABLE * H100.memory_gib
        assert one.times.gpus == ranks + changed.rollout.server_gpus <= world + 1
        assert one.gib == pytest.approx(smallest_gpu(changed, memory, server.parts(), server.reload_bytes() / 2**30))
        assert one.times.step == pytest.approx(step_times(changed, MODEL, ranks, H100, LENGTHS).step)


def test_what_the_search_proposes_also_undoes_what_the_config_had():
    """For a config with its own tp, ep and stages: each proposal, written as overrides of that file, gives the planned
    layout."""
    path = REPOSITORY / "configs" / "qwen3_30b_a3b_1node.yaml"
    own = load_config(path, ["parallel.pp=2", "parallel.ep=4", "parallel.pipeline_layers=[23,25]"])
    model = parse_hf_config(json.loads((REPOSITORY / "configs/models/Qwen/Qwen3-30B-A3B/config.json").read_text()))
    found = search(own, model, 8, GPUS["h200"], LENGTHS, keep=40)
    assert {1, 8} <= {one.config.parallel.pp * one.config.parallel.vpp for one in found}
    assert all(one.gib <= USABLE_WITH_EXPERTS * GPUS["h200"].memory_gib for one in found)
    for one in found:
        changed = load_config(
            path, ["parallel.pp=2", "parallel.ep=4", "parallel.pipeline_layers=[23,25]", *one.overrides]
        )
        assert step_times(changed, model, 8, GPUS["h200"], LENGTHS) == one.times


MANY = 30_000  # predictions of a step that a search may make; these make 9,534 to 21,958


def layouts_timed(monkeypatch) -> list[tuple]:
    """The arguments of each prediction of a step that a search makes from now on."""
    timed, predict = [], layout_search.step_times
    monkeypatch.setattr(layout_search, "step_times", lambda *words: timed.append(words) or predict(*words))
    return timed


@pytest.mark.full
def test_a_search_for_671_billion_parameters_on_2048_gpus_times_few_layouts(monkeypatch):
    settings = config(
        f"model.path={DEEPSEEK}",
        "rollout.placement=dedicated",
        "rollout.servers=32",
        "rollout.tp=32",
        "rollout.gpu_memory_utilization=0.9",
    )
    timed = layouts_timed(monkeypatch)
    found = search(
        settings,
        parse_hf_config(json.loads((DEEPSEEK / "config.json").read_text())),
        2048,
        H100,
        expected_lengths(settings),
    )
    assert len(found) == 5 and len(timed) < MANY
    assert len({one.overrides for one in found}) == 5


@pytest.mark.full
@pytest.mark.parametrize(("gpus", "prompts"), [(512, 1024), pytest.param(16384, 8192, marks=pytest.mark.full)])
def test_dedicated_servers_get_as_many_gpus_as_keep_the_trainer_busy(gpus, prompts, monkeypatch):
    """The shipped config of a 235B model has eight servers, which a larger trainer would wait for."""
    settings = load_config(
        REPOSITORY / "configs" / "qwen3_235b_a22b_16nodes.yaml", [f"rollout.prompts_per_step={prompts}"]
    )
    shape = REPOSITORY / "configs" / "models" / settings.model.path / "config.json"
    model = parse_hf_config(json.loads(shape.read_text()))
    ranks, lengths = gpus - settings.rollout.server_gpus, expected_lengths(settings)
    own = step_times(settings, model, ranks // 64 * 64, H100, lengths)
    assert idle_ranks(own) > 0.8 and own.bound == "generation"
    timed = layouts_timed(monkeypatch)
    found = search(settings, model, ranks, H100, lengths)
    assert len(found) == 5 and len(timed) < MANY
    for one in found:
        assert one.times.gpus <= gpus and one.times.step < own.step / 3
        assert idle_ranks(one.times) < 0.6 and one.bound.split()[0] in ("generation", "training")
    assert idle_ranks(found[0].times) < 0.35


def test_of_equal_steps_the_search_prefers_the_faster_trainer_and_of_nearly_equal_trainers_fewer_stages():
    keys = ["rollout.placement=dedicated", "rollout.max_staleness=1", "algorithm.importance_correction=token_truncate"]
    times = step_times(config(*keys), MODEL, 8, H100, LENGTHS)

    def cost(train: float, stages: int) -> float:
        return _cost(replace(times, seconds=times.seconds | {"generate": 100.0, "train": train}), stages)

    assert cost(40, 16) < cost(50, 8) < cost(50, 9) < cost(51, 8)  # generation takes 70 s or more
    assert cost(49.9, 16) > cost(50, 8)
    assert cost(120, 1) - cost(110, 1) > 4 * (cost(50, 1) - cost(40, 1))  # the trainer is slower in most cases


def idle_ranks(times) -> float:
    """The share of a step in which the trainer's ranks wait for servers."""
    return 1 - (times.computing + times.seconds["sync"] + times.seconds["control"]) / times.step


def test_servers_that_do_not_fit_get_a_larger_tp_and_as_many_gpus():
    settings = config("rollout.placement=dedicated", "rollout.servers=8", "rollout.gpu_memory_utilization=0.15")
    own, *_ = splits_of(settings, MODEL, 8, 79)
    assert (own.config.rollout.tp, own.config.rollout.servers, own.world_size) == (2, 4, 8)
    found = search(settings, MODEL, 8, H100, LENGTHS)
    assert found and all("rollout.tp=2" in one.overrides and one.times.gpus <= 16 for one in found)


@pytest.mark.parametrize("total", [6, 8, 24, 36, 512])
def test_splits_use_at_most_the_gpus_of_the_run_in_whole_nodes(total):
    servers = config("rollout.placement=dedicated", "rollout.servers=2", "rollout.tp=2")
    splits = splits_of(servers, MODEL, total - 4, 79)
    assert splits[0].config == servers and splits[0].world_size == total - 4
    node = 1 if total <= 8 else math.gcd(total, 8)
    for split in splits[1:]:
        used = split.config.rollout.server_gpus
        assert 0 < split.world_size <= total - used and used > 0 and used % node == split.world_size % node == 0
    assert len(splits) < 700 and {split.world_size for split in splits} > {node, total - 2 * node}


def test_the_search_gives_colocated_servers_all_gpus_and_the_tp_that_generates_fastest(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    keys = [f"model.path={tmp_path}", "rollout.servers=1", "rollout.tp=2"]
    own = config(*keys)
    found = search(own, MODEL, 8, H100, LENGTHS)
    waits = step_times(own, MODEL, 8, H100, LENGTHS)
    assert found[0].times.step < 0.75 * waits.step and found[0].times.idle < waits.idle / 2
    best = found[0].config.rollout
    others = [config(f"rollout.servers={8 // tp}", f"rollout.tp={tp}") for tp in (1, 2, 4, 8)]
    seconds = {one.rollout.tp: Generation(one, MODEL, H100, LENGTHS).seconds() for one in others}
    assert best.servers == 8 // best.tp and best.tp == min(seconds, key=seconds.__getitem__)
    for one in found:
        changed = config(*keys, *one.overrides)
        assert step_times(changed, MODEL, 8, H100, LENGTHS) == one.times and plan(changed, 8, 79).problems == []
    on_nodes = splits_of(config("run.nodes=3", "rollout.servers=3"), MODEL, 9, 79)
    assert [(s.config.rollout.servers, s.config.rollout.tp) for s in on_nodes] == [(3, 1), (9, 1), (3, 2)]
    assert len(splits_of(config("rollout.servers=8"), MODEL, 8, 79)) == 4


def test_the_control_plane_grows_with_samples_tokens_and_replicas_and_reading_overlaps_with_generation():
    def control(*overrides: str, world: int = 64, lengths: Lengths = LENGTHS) -> dict[str, float]:
        return control_seconds(config(*overrides), world, lengths)

    base, more = control(), control("rollout.prompts_per_step=640")
    assert all(more[part] == pytest.approx(10 * base[part], rel=0.3) for part in ("read", "pack", "write"))
    assert base["read"] == pytest.approx(16 * (REQUEST_SECONDS + 800 * READ_TOKEN_SECONDS))  # of 1024 samples
    assert control(lengths=Lengths(200, 1600, 1600))["write"] > 1.5 * base["write"]
    stages = control("parallel.pp=4")  # a quarter of the leaders
    assert stages["read"] == 4 * base["read"] and stages["write"] == base["write"]
    alone = control(world=1)
    assert alone["tokens"] == alone["facts"] == alone["agree"] == 0
    assert control(world=16384)["agree"] == pytest.approx(14 / 6 * base["agree"])
    times = step_times(config(), MODEL, 64, H100, LENGTHS)
    assert times.seconds["control"] == pytest.approx(sum(base.values()) - base["read"])
    slow = config("rollout.prompts_per_step=40000", "rollout.servers=64")
    times = step_times(slow, MODEL, 1, H100, Lengths(1, 1, 1), generate=10.0)
    assert times.seconds["control"] > times.control["read"] - 10 > 100 and times.bound == "control plane"


def test_leaders_keep_what_they_sampled_and_every_rank_its_replicas_micro_batches():
    memory = planned_step_memory(config("parallel.pp=2"), 16, LENGTHS)
    leader, rank, node = memory["leader"], memory["rank"], memory["node"]
    own = 1024 / 8  # samples of a replica
    assert leader["rollouts"] - 8 * own * 800 == own * ROLLOUT_BYTES and "rollouts" not in rank
    assert rank["micro_batches"] == leader["micro_batches"] == 57 * own * 1000
    assert leader["rows"] == 2 * rank["rows"] == 8 * own * 1800 and rank["facts"] == leader["facts"]
    assert sum(node.values()) == pytest.approx(8 * sum(leader.values()))  # the ranks of the first stage are leaders
    wide = planned_step_memory(config("parallel.tp=4", "parallel.sequence_parallel=true"), 16, LENGTHS)
    assert sum(wide["node"].values()) == pytest.approx(
        2 * sum(wide["leader"].values()) + 6 * sum(wide["rank"].values())
    )
    correction = ["algorithm.importance_correction=token_truncate", "algorithm.importance_correction_max=2"]
    keys = ["parallel.pp=2", "rollout.placement=dedicated", "rollout.max_staleness=3", *correction]
    ahead = planned_step_memory(config(*keys), 16, LENGTHS)["leader"]  # the pool holds three more steps
    assert ahead["rollouts"] == 4 * leader["rollouts"] and ahead["micro_batches"] == leader["micro_batches"]
    together = planned_step_memory(config("rollout.max_num_seqs=1024"), 1, Lengths(1, 800, 800))["leader"]
    assert together["json"] > 1000 * 800 * 97  # responses of equal length end together, and wait to be read


def test_routes_are_kept_by_their_leader_and_cut_over_the_ranks_that_replay_them():
    replayed = config("parallel.pp=2", "parallel.tp=2", "parallel.sequence_parallel=true")
    plain, with_routes = (planned_step_memory(replayed, 16, LENGTHS, routes) for routes in (0, 384))
    own = 1024 / 4  # samples of a replica
    assert with_routes["leader"]["rollouts"] - plain["leader"]["rollouts"] == own * 1000 * 384
    assert with_routes["rank"]["routes"] == own * 1000 * 384 / 4 and "routes" not in plain["rank"]


def test_routes_take_time_to_read_and_to_exchange():
    def control(routes: int, *overrides: str, world: int = 64) -> dict[str, float]:
        return control_seconds(config(*overrides), world, LENGTHS, routes)

    plain, with_routes, twice = (control(routes) for routes in (0, 384, 768))
    assert "routes" not in plain and {part for part in plain if plain[part] != with_routes[part]} == {"read"}
    assert 1.8 < twice["routes"] / with_routes["routes"] < 2.1
    assert 0 < control(384, world=1)["routes"] < control(384, "parallel.pp=2", world=2)["routes"]
    sharded = control(384, "parallel.tp=8", "parallel.sequence_parallel=true")["routes"]
    assert control(384, "parallel.tp=8")["routes"] > 1.5 * sharded  # each rank then has all tokens
    raw = json.loads((REPOSITORY / "configs/models/Qwen/Qwen3-30B-A3B/config.json").read_text())
    times = step_times(config("rollout.routing_replay=engine"), parse_hf_config(raw), 64, H100, LENGTHS)
    assert times.control["routes"] == with_routes["routes"] and times.seconds["control"] > with_routes["routes"]


def test_a_token_of_a_model_with_many_experts_has_two_bytes_per_expert():
    raw = json.loads((REPOSITORY / "configs/models/Qwen/Qwen3-30B-A3B/config.json").read_text())
    for experts, expected in ((128, 48 * 8), (384, 2 * 48 * 8)):
        model = parse_hf_config(raw | dict(num_experts=experts))
        assert route_bytes(config("rollout.routing_replay=engine"), model) == expected
        assert route_bytes(config(), model) == 0


def test_a_sync_is_bound_by_senders_where_servers_have_more_gpus_than_the_trainer():
    few, many = (
        step_times(config("rollout.placement=dedicated", f"rollout.servers={n}"), MODEL, 8, H100, LENGTHS)
        for n in (4, 16)
    )
    assert few.sync["receivers"] == 2 * few.sync["senders"] and many.sync["senders"] == 2 * many.sync["receivers"]
    assert few.seconds["sync"] == few.sync["receivers"] and many.seconds["sync"] == many.sync["senders"]
    shown = ["\n".join(times_table(times)) for times in (few, many)]
    assert ", bound by receivers\n" in shown[0] and ", bound by senders\n" in shown[1]


def test_the_search_prints_keys_to_set_or_that_nothing_fits(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    words = [str(REPOSITORY / "configs/quickstart.yaml"), "world_size=8", f"model.path={tmp_path}", "--search"]
    words += ["model.precision=bf16", "train.distributed_optimizer=true", "rollout.placement=dedicated"]
    share = "rollout.gpu_memory_utilization"
    assert main(["plan", *words, f"{share}=0.9", "--gpu", "h100"]) == 0
    assert "train.max_tokens_per_micro_batch=" in capsys.readouterr().out
    assert main(["plan", *words, f"{share}=0.1", "--gpu", "h100"]) == 2
    assert "no layout of 8 ranks fits h100" in capsys.readouterr().err
    assert main(["plan", *words]) == 2
    assert "--search: needs --gpu" in capsys.readouterr().err


def test_the_command_says_all_of_it_in_json_without_torch(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    code = "import sys; sys.modules['torch'] = None; from megagrpo.__main__ import main; sys.exit(main(sys.argv[1:]))"
    arguments = [
        sys.executable,
        "-c",
        code,
        "plan",
        str(REPOSITORY / "configs" / "quickstart.yaml"),
        f"model.path={tmp_path}",
    ]
    arguments += ["world_size=8", "train.distributed_optimizer=true", "model.precision=bf16", "parallel.tp=8"]
    arguments += [
        "parallel.sequence_parallel=true",
        "--gpu",
        "h200",
        "rollout.max_completion_length=24",
        "response_tokens=20",
    ]
    told = subprocess.run([*arguments, "--json"], capture_output=True, text=True)
    made = json.loads(told.stdout)
    assert told.returncode == 0 and made["problems"] == []
    assert made["times"]["step"] == pytest.approx(
        sum(s for phase, s in made["times"]["seconds"].items() if phase != "load")
    )
    assert set(made["memory_gib"]) == {"load", "generate", "logprobs", "train", "sync"}
    assert "32 tokens a prompt and 20 a response on average, 24 at most" in made["rows"]["lengths"]
    shown = subprocess.run(arguments, capture_output=True, text=True).stdout
    assert f"{made['times']['seconds']['train']:11.1f}" in shown


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"gpu": "h300"}, "gpu: h300 is not known; choose one of a100, h100, h200, b200"),
        (
            {"response_tokens": 5.0},
            "response_tokens: predicted seconds need a kind of GPU; add gpu (--gpu), one of a100, h100, h200, b200",
        ),
        (
            {"gpu": "h100", "response_tokens": 1e6},
            "response_tokens: 1e+06 is above the longest that the config allows, ",
        ),
        ({"gpu": "h100", "prompt_tokens": 1e6}, "prompt_tokens: 1e+06 is above the longest that the config allows, "),
    ],
)
def test_what_is_asked_wrongly_is_refused(asked, message):
    with pytest.raises(ConfigError) as error:
        megagrpo.plan(config(), **asked)
    assert str(error.value).startswith(message)


def test_most_published_steps_are_within_thirty_percent_and_published_peaks_within_twenty():
    spent, held = benchmark("published_steps"), benchmark("published_memory")
    errors = [abs(spent.predicted(row).step / row.seconds - 1) for row in spent.ROWS]
    assert sum(error < 0.3 for error in errors) >= 0.9 * len(errors) and max(errors) < 0.35
    assert all(error < 0.3 for error, row in zip(errors, spent.ROWS, strict=True) if row.held_out)
    # The GPU's allocator holds more than the tensors in it.
    assert all(0.8 * row.gib < held.predicted(row) < row.gib for row in held.ROWS)


def benchmark(name: str):
    spec = importlib.util.spec_from_file_location(name, REPOSITORY / "benchmarks" / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_plan_without_a_model_has_no_seconds(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    made = plan(config("model.path=nobody/no-such-model"), 1)
    assert with_times(made, config(), 1, H100, LENGTHS) is made


def test_a_step_of_several_tasks_has_their_groups_and_lengths():
    """3 of 4 prompts: 4 responses of up to 16 tokens; the others: 8 of up to 200, of turns."""
    data, turns = {"train": {"source": "d.jsonl"}}, {"scheduler": "a.py:f", "max_response_length": 200, "max_turns": 2}
    of_short = {"rollout": {"num_generations": 4, "max_prompt_length": 100}, "sampling": {"max_tokens": 16}}
    config = RunConfig.model_validate(
        {
            "model": {"path": "m"},
            "rollout": {"prompts_per_step": 8, "max_prompt_length": 300, "max_completion_length": 64},
            "rewards": {"functions": [{"function": "accuracy"}]},
            "tasks": [
                {"name": "short", "weight": 3, "data": data} | of_short,
                {"name": "long", "weight": {"by": "pass_rate"}, "data": data, "multi_turn": turns},
            ],
        }
    )
    assert step_samples(config) == 8 * 3 // 4 * 4 + 8 // 4 * 8 == 40
    lengths = expected_lengths(config)
    assert lengths.prompt == (0.75 * 100 + 0.25 * 300) / 2 and lengths.longest == 200
    assert lengths.response == pytest.approx((24 * 16 + 16 * 200) / 40 / 2)
    (text,) = (text for name, text in rows_of(config, 1, None, None, None) if name == "tasks")
    assert text.startswith(
        "short 75% of the prompts x 4, prompts of up to 100 and responses of up to 16 tokens; long 25%"
    )
