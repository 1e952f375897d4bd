"""benchmarks/tracing: a step on tensors without data has the formula's FLOPs and the plan's memory."""

import json
from pathlib import Path

import pytest

from benchmarks.tracing.roofline import (
    HOST_COPY,
    Costs,
    Kernel,
    Message,
    Trace,
    kernel_seconds,
    message_seconds,
    micro_batches,
    roofline,
)
from megagrpo.config import load_config
from megagrpo.families.hf_config import load_hf_config, parse_hf_config
from megagrpo.families.weight_sources import shape_folder
from megagrpo.planner.costs.engine_memory import GIB
from megagrpo.planner.costs.flops import attention_flops, token_flops
from megagrpo.planner.costs.gpu_specs import GPUS, HOST_GB_PER_S
from megagrpo.planner.costs.hidden_messages import sent_rows
from megagrpo.planner.costs.planned_memory import stage_memory
from megagrpo.planner.costs.shapes import num_parameters
from megagrpo.planner.costs.workload import Lengths, expected_lengths
from tests.unit.in_a_fork import in_a_fork

ROOT = Path(__file__).parents[3]
TINY = dict(
    model_type="llama", architectures=["LlamaForCausalLM"], hidden_size=256, intermediate_size=768, num_hidden_layers=3
)
TINY |= dict(
    num_attention_heads=8, num_key_value_heads=4, head_dim=32, vocab_size=4096, max_position_embeddings=4096
) | dict(rms_norm_eps=1e-6)
TINY |= dict(tie_word_embeddings=False, torch_dtype="bfloat16", rope_theta=10000.0)
MIXTURE = (
    TINY
    | dict(model_type="qwen3_moe", architectures=["Qwen3MoeForCausalLM"], num_hidden_layers=4, norm_topk_prob=True)
    | dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=384)
)
PROMPT, RESPONSE = 256, 768


def settings(folder: Path, model: dict = TINY) -> list[str]:
    (folder / "config.json").write_text(json.dumps(model))
    words = (
        "rollout.max_prompt_length=256 rollout.max_completion_length=768 "
        "train.max_tokens_per_micro_batch=2048 parallel.tp=1 parallel.sequence_parallel=false"
    ).split()
    return [f"model.path={folder}", *words, "train.logprob_chunk=512"]


OFFLOADED = ("train.optimizer_offload=true", "train.optimizer_state_dtype=bf16")
STAGE_OF_EXPERTS = (
    "parallel.pp=2",
    "parallel.ep=2",
)  # the first of two stages, which share experts over two ranks each
# Name -> model, extra micro batches, layout.
TRACES = dict(one=(TINY, 1, ()), three=(TINY, 3, ()), offloaded=(TINY, 1, OFFLOADED)) | dict(
    fused=(TINY, 1, ("model.fusions=[bias_activation]",)), experts=(MIXTURE, 1, STAGE_OF_EXPERTS)
)


def traced(path: str, cases: list) -> list[dict]:
    """What the tests read of the trace of each (micro-batches beside the first, words of a config)."""
    from benchmarks.tracing.traced_step import trace_step

    found = []
    for extra, words in cases:
        config = load_config(path, words)
        trace = trace_step(config, load_hf_config(shape_folder(config.model.path)), 4, 0, PROMPT, RESPONSE, extra)
        each, phases = trace.each, ("forward", "head", "backward")
        kinds = ("products", "experts", "attention")
        flops = {f"{phase}/{kind}": each.total("flops", phase, kind) for phase in phases for kind in kinds}
        messages = trace.fixed.messages
        found.append(
            dict(
                flops=flops,
                waits={phase: each.waits[phase] for phase in phases},
                traffic={phase: each.total("bytes", phase, "elementwise") for phase in phases},
                launches=[each.total("launches", phase) for phase in phases],
                fixed_waits=trace.fixed.waits,
                messages=[[m.phase, m.operation, m.bytes, m.ranks] for m in messages],
                copied=sum(m.bytes * count for m, count in messages.items() if m.operation == HOST_COPY),
                peak=trace.peak,
                tokens=trace.tokens,
            )
        )
    return found


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    return traces_of(tmp_path_factory, TRACES)


def traces_of(tmp_path_factory, wanted: dict):
    """Name -> config, model and trace of one rank of four, in a fork, because a trace creates process groups."""
    path = str(ROOT / "configs" / "qwen2.5_7b_1node.yaml")
    words = {
        name: [*settings(tmp_path_factory.mktemp(name), model), *layout] for name, (model, _, layout) in wanted.items()
    }
    found = in_a_fork(traced, path, [(wanted[name][1], own) for name, own in words.items()])
    return {
        name: (load_config(path, words[name]), parse_hf_config(model), trace)
        for (name, (model, *_)), trace in zip(wanted.items(), found, strict=True)
    }


@pytest.mark.full
def test_traced_flops_are_those_of_the_formula(traces):
    _, model, found = traces["one"]
    flops, tokens, responses = token_flops(model), 2 * (PROMPT + RESPONSE), 2 * RESPONSE
    assert found["tokens"] == tokens
    norms = 2 * (2 * model.num_layers + 1) * model.hidden_size  # the formula counts their weights as products
    assert found["flops"]["forward/products"] == (flops.blocks - norms) * tokens
    assert found["flops"]["backward/products"] == 2 * (flops.blocks - norms) * tokens
    assert found["flops"]["head/products"] == 3 * flops.head * responses  # with its gradients, computed ahead
    assert found["flops"]["forward/attention"] == 2 * attention_flops(model, PROMPT + RESPONSE)
    assert found["flops"]["backward/attention"] == 2.5 * found["flops"]["forward/attention"]


def test_a_padded_micro_batch_has_its_mask_and_the_shape_that_stages_exchange(tmp_path):
    from benchmarks.tracing.traced_step import _message_shape, batch_of
    from benchmarks.tracing.without_floats import WithoutFloats

    words = [*settings(tmp_path), "parallel.tp=4", "parallel.sequence_parallel=true"]
    config = load_config(ROOT / "configs" / "qwen2.5_7b_1node.yaml", words)
    with WithoutFloats(lambda *operation: None):
        (micro_batch,) = batch_of(config, parse_hf_config(TINY), False, PROMPT, RESPONSE - 1, 1).micro_batches
    assert _message_shape(config, parse_hf_config(TINY), PROMPT, RESPONSE - 1) == (
        micro_batch.num_tokens // 4,
        1,
        TINY["hidden_size"],
    )
    per = 2048 // (PROMPT + RESPONSE - 1)
    assert micro_batch.num_tokens % 4 == 0 < per * (PROMPT + RESPONSE - 1) % 4 and int(
        micro_batch.loss_mask.sum()
    ) == per * (RESPONSE - 1)


def test_what_a_micro_batch_adds_does_not_depend_on_their_number(traces):
    one, three = traces["one"][2], traces["three"][2]
    assert one["flops"] == three["flops"] and one["launches"] == pytest.approx(three["launches"])


@pytest.mark.parametrize(("name", "ranks"), [("one", 4), ("experts", 2)])
def test_traced_memory_is_the_plans(traces, name, ranks):
    config, model, found = traces[name]
    planned = stage_memory(config, model, ranks)[0]["train"]
    assert sum(found["peak"].values()) / GIB == pytest.approx(sum(planned.values()), rel=0.1)


@pytest.mark.parametrize(("dtype", "size"), [pytest.param("fp32", 8, marks=pytest.mark.full), ("bf16", 4)])
def test_moments_on_the_host_take_no_memory_of_the_device_and_are_copied_there_and_back(
    traces, tmp_path_factory, dtype, size
):
    _, model, here = traces["one"]
    if dtype != "bf16":
        words = OFFLOADED[0], f"train.optimizer_state_dtype={dtype}"
        traces = traces_of(tmp_path_factory, {"offloaded": (TINY, 1, words)})
    offloading, _, found = traces["offloaded"]
    own = num_parameters(model) / 4  # of four data-parallel ranks
    assert sum(here["peak"].values()) - sum(found["peak"].values()) == pytest.approx(8 * own, rel=0.05)
    planned = stage_memory(offloading, model, 4)[0]["train"]
    assert sum(found["peak"].values()) / GIB == pytest.approx(sum(planned.values()), rel=0.1)
    assert found["copied"] == pytest.approx(2 * size * own, rel=0.01) and here["copied"] == 0
    copies = Message("optimizer", HOST_COPY, 1e9, 1)
    trace = Trace(
        Costs(messages={copies: 3}), Costs(kernels={Kernel("forward", "products", 1e12, 1e6): 1}), {}, 2048, 1536
    )
    made = roofline(offloading, model, trace, 4, GPUS["h100"], Lengths(256, 768, 768))
    assert made.seconds["optimizer"] == pytest.approx(3 / HOST_GB_PER_S) and "messages" not in made.losses
    assert made.losses["copies of moments to the host and back"] == pytest.approx(3 / HOST_GB_PER_S / made.total)


def test_the_host_waits_once_a_step_for_its_metrics_and_once_for_the_norm_of_the_gradient(traces):
    _, _, found = traces["one"]
    assert not any(found["waits"].values()) and found["fixed_waits"] == {"forward": 1, "optimizer": 1}


def test_experts_are_grouped_products_with_the_formulas_flops_and_one_wait_of_the_host_a_layer(traces):
    _, model, found = traces["experts"]
    layers, tokens = model.num_layers // 2, 2 * (PROMPT + RESPONSE)
    expected = layers * tokens * 2 * 2 * 3 * model.hidden_size * model.mixture.intermediate_size
    assert found["flops"]["forward/experts"] == expected and found["flops"]["backward/experts"] == 2 * expected
    assert found["flops"]["head/products"] == 0 and found["waits"] == {"forward": layers, "head": 0, "backward": 0}


def test_a_fused_activation_reads_and_writes_once(traces):
    """Apart: silu(gate), up + 0 and their product move 2, 2 and 3 widths; fused: 3."""
    (_, model, apart), (_, _, fused) = traces["one"], traces["fused"]
    width = 2 * 2 * (PROMPT + RESPONSE) * model.intermediate_size * model.num_layers  # bytes of all tokens and layers
    saved = {phase: apart["traffic"][phase] - fused["traffic"][phase] for phase in ("forward", "backward")}
    assert saved["forward"] == 4 * width and saved["backward"] > 4 * width


def test_norms_and_attention_are_one_kernel_a_layer(traces):
    """A layer reads and writes hidden states in two norms and two sums; rotations move queries and keys, activations 7
    widths of the MLP. Nothing copies packed tokens."""
    _, model, found = traces["one"]
    tokens, hidden = 2 * (PROMPT + RESPONSE), model.hidden_size
    heads = (model.num_heads + model.num_kv_heads) * model.head_dim
    layer = 2 * 2 * hidden + 2 * 3 * hidden + 4 * heads + 7 * model.intermediate_size
    assert 1.0 <= found["traffic"]["forward"] / (2 * tokens * model.num_layers * layer) < 1.2


def test_gradients_and_weights_are_the_messages_of_a_data_parallel_step(traces):
    _, _, found = traces["one"]
    sent = {phase: (size, ranks) for phase, _, size, ranks in found["messages"] if size > 10**6}
    assert (
        sent.keys() == {"reduce", "optimizer"}
        and sent["reduce"][0] == 2 * sent["optimizer"][0]
        and sent["reduce"][1] == 4
    )


def test_a_kernel_takes_the_longer_of_computing_and_reading():
    gpu = GPUS["h100"]
    assert kernel_seconds(Kernel("forward", "products", 989e12, 8), gpu) == pytest.approx(1 / 0.6)
    assert kernel_seconds(Kernel("forward", "elementwise", 0, 3350e9), gpu) == pytest.approx(1 / 0.8)


def test_a_roofline_names_what_keeps_the_mfu_down(tmp_path):
    config, model = load_config(ROOT / "configs" / "qwen2.5_7b_1node.yaml", settings(tmp_path)), parse_hf_config(TINY)
    useful, traffic = Kernel("forward", "products", 1e12, 1e6), Kernel("head", "elementwise", 0, 1e12)
    trace = Trace(Costs(), Costs().plus(Costs(kernels={useful: 1, traffic: 3})), {}, 2048, 1536)
    made = roofline(config, model, trace, 4, GPUS["h100"], Lengths(256, 768, 768))
    assert next(iter(made.losses)) == "elementwise work of the LM head" and sum(made.losses.values()) + made.mfu <= 1.01


def test_the_trace_subtracts_hidden_messages_and_shrinks_those_of_deepep():
    alone = ["train.overlap=[]", "parallel.pp=2", "parallel.vpp=2"]
    model = load_hf_config(shape_folder("Qwen/Qwen3-30B-A3B"))
    gpu, product = GPUS["h100"], Kernel("backward", "experts", 1e12, 1e6)
    sent = Message("backward", "alltoall_base", 1e9, 8)
    costs = Costs()
    costs.kernels[product], costs.messages[sent] = 10, 4
    trace = Trace(Costs(), costs, {}, 10240, 8192)

    def backward(*overrides: str) -> float:
        config = load_config("megagrpo:qwen3_30b_a3b_4nodes", [*alone, *overrides])
        lengths = expected_lengths(config)
        count = micro_batches(config, trace, 16, lengths)
        return roofline(config, model, trace, 16, gpu, lengths).seconds["backward"] / count

    computing, sending = 10 * kernel_seconds(product, gpu), 4 * message_seconds(sent, gpu)
    assert backward() == pytest.approx(computing + sending)
    assert backward("train.overlap=[weight_gradients]") == pytest.approx(
        computing + sending - min(sending, computing) / 2
    )
    config = load_config("megagrpo:qwen3_30b_a3b_4nodes", [*alone, "parallel.expert_dispatcher=deepep"])
    fewer = Message("backward", "alltoall_base", 1e9 * sent_rows(config.parallel, model) / 8, 8)
    assert backward("parallel.expert_dispatcher=deepep") == pytest.approx(computing + 4 * message_seconds(fewer, gpu))
