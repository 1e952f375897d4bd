"""LoRA against PEFT on transformers' model: the same folder gives the same logits and gradients, and files convert both
ways."""

from __future__ import annotations

import contextlib
import json
from functools import partial

import pytest
import torch
from checkpoint_now import save_now
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from suites import usual
from tiny_policy import tiny_run, whole_model

from megagrpo.algorithms.losses import make_loss
from megagrpo.config import LoraSection, ParallelSection
from megagrpo.data.packing.sample_packing import pack, packing_rules
from megagrpo.families.hf_config import load_hf_config
from megagrpo.platform.parallel.agree import RankError
from megagrpo.platform.parallel.layout import init_layout
from megagrpo.policy.megatron_policy import MegatronPolicy
from megagrpo.policy.reference import Reference
from megagrpo.proof.verify.verified_step import relative_error, whole_tensors
from megagrpo.records.checkpoints.checkpoint import Checkpointer
from megagrpo.records.checkpoints.run_files import newest_checkpoint
from megagrpo.train_types import TrainSample, TrainState
from megagrpo.weights.blocks.parameter_blocks import adapter_blocks
from megagrpo.weights.bridge.adapter_files import (
    fill_adapters,
    fresh_matrix,
    load_adapter,
    merge,
    read_lora,
    save_adapter,
)
from megagrpo.weights.bridge.hf_export import find_sources
from megagrpo.weights.bridge.load import load_hf

TINY = dict(
    hidden_size=48,
    num_hidden_layers=4,
    num_attention_heads=6,
    num_key_value_heads=2,
    intermediate_size=80,
    vocab_size=127,
    head_dim=8,
)
LORA = dict(rank=4, alpha=20.0, target_modules="all-linear")
SAMPLES = [(5, 9, 1.5), (3, 14, -0.7), (8, 1, 0.4)]  # prompt length, response length, advantage


def samples() -> list[TrainSample]:
    generator = torch.Generator().manual_seed(3)
    made = []
    for prompt, response, advantage in SAMPLES:
        ids = torch.randint(0, 127, (prompt + response,), generator=generator)
        mask = torch.arange(len(ids)) >= prompt
        made.append(TrainSample(ids, mask, torch.zeros(len(ids)), advantage))
    return made


@contextlib.contextmanager
def under_another_name(model):
    """PEFT takes gate_proj, up_proj and down_proj of the mixtures that it knows for the experts of transformers 4."""
    kind, model.config.model_type = model.config.model_type, "unknown"
    yield
    model.config.model_type = kind


def make_with_peft(root, kind="Qwen2", shape=None, std=0.3, **selection):
    """A model and an adapter saved by transformers and PEFT, merged weights, logits, and gradients. The loss is
    on-policy `dapo`: the mean over response tokens of -A log-prob."""
    import transformers
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    shape = TINY | dict(initializer_range=0.1, pad_token_id=None) | (shape or {})
    build = getattr(transformers, f"{kind}ForCausalLM")
    model = build(build.config_class(**shape))
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.data -= 3  # states decay slowly, so the gradients of their decays are far above rounding
    model.save_pretrained(root / "model")
    selection = dict(target_modules="all-linear") | selection
    lora = LoraConfig(r=4, lora_alpha=10, use_rslora=True, task_type="CAUSAL_LM", **selection)
    with under_another_name(model):
        adapted = get_peft_model(model, lora)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=std)
            elif "lora_magnitude_vector" in name:
                parameter.mul_(1 + std * torch.randn(len(parameter)))
    adapted.save_pretrained(root / "adapter")
    loss, logits = 0.0, []
    for sample in samples():
        logits.append(adapted(sample.token_ids[None]).logits[0])
        logprobs = (logits[-1][:-1] / 0.8).log_softmax(-1).gather(1, sample.token_ids[1:, None])[:, 0]
        loss = loss - sample.advantage * logprobs[sample.response_mask[1:]].sum()
    (loss / sum(response for _, response, _ in SAMPLES)).backward()
    gradients = {
        name.replace("vector.default.weight", "vector").replace(".default", ""): p.grad.double()
        for name, p in adapted.named_parameters()
        if p.requires_grad
    }
    adapted.merge_and_unload().save_pretrained(root / "merged")
    merged = {name: tensor.clone() for name, tensor in load_file(root / "merged/model.safetensors").items()}
    return gradients, merged, torch.cat([row.detach() for row in logits])


def prepare(root, parallel: dict, **lora):
    config = tiny_run(
        parallel, lora=LORA | lora, algorithm=dict(loss_type="dapo", beta=0.0), train=dict(max_grad_norm=0.0)
    )
    config = config.model_copy(update=dict(lora=LoraSection(**LORA | lora)))  # tiny_run makes the adapters small
    layout = init_layout(config.parallel)
    hf_config = load_hf_config(root / "model")
    policy = MegatronPolicy(config, layout, hf_config)
    load_hf(policy.chunks, hf_config, root / "model", layout)
    fill_adapters(policy.chunks, hf_config, layout, config.lora, seed=5)
    policy.weights_changed()
    batch = pack(samples(), packing_rules(config, policy.shares_prompts), layout.dp_rank, layout.dp_size)
    return config, layout, hf_config, policy, batch


def _step(root, parallel, out, selection=None):
    lora = dict(adapter_path=str(root / "adapter")) | (selection or {})
    config, layout, hf_config, policy, batch = prepare(root, parallel, **lora)
    merged = dict(whole_model(policy))
    policy.backward(batch, make_loss(config.algorithm), batch.num_tokens)
    gradients, _, _ = whole_tensors(policy, hf_config, layout, lambda p: p.main_grad)
    adapters = list(adapter_blocks(policy.chunks, hf_config, layout))
    sources = find_sources(adapters, layout)
    save_adapter(adapters, layout, sources, out, config.lora, "base", policy.dtype)
    frozen = [p for chunk in policy.chunks for p in chunk.parameters() if not p.requires_grad]
    held = sum(p.numel() for chunk in policy.chunks for p in chunk.parameters() if p.requires_grad)
    clean = not any(hasattr(p, "main_grad") or p.grad is not None for p in frozen)
    buffers = sum(b.grad_data.numel() for chunk in policy.model for b in chunk.buffers)
    return gradients, merged, clean, held, buffers


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    import peft  # noqa: F401 - once here, not in every fork

    root = tmp_path_factory.mktemp("peft")
    return root, *run_ranks(make_with_peft, 1, root)[0]


@pytest.fixture(scope="module")
def made_fused(tmp_path_factory):
    """A model with fused weights for queries, keys and values, and for gate and up projection: its adapters are fused
    too."""
    root = tmp_path_factory.mktemp("peft_fused")
    return root, *run_ranks(make_with_peft, 1, root, "Phi3")[0]


@pytest.mark.parametrize("parallel", usual([dict(tp=2, sequence_parallel=True), {}, dict(pp=2, vpp=2)], 0), ids=str)
def test_gradients_merged_weights_and_files_are_those_of_peft(parallel, made, tmp_path):
    assert_as_peft(parallel, made, tmp_path)


@pytest.mark.parametrize(
    "parallel", [dict(tp=2, sequence_parallel=True), pytest.param(dict(pp=2), marks=pytest.mark.full)], ids=str
)
def test_so_are_those_of_fused_projections(parallel, made_fused, tmp_path):
    assert {name.split(".")[-3] for name in made_fused[1]} == {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
    assert_as_peft(parallel, made_fused, tmp_path)


LAYERS = dict(target_modules=["q_proj", "o_proj", "gate_proj", "mlp.down_proj"], layers_to_transform=[3])
EXPRESSION = dict(target_modules=r".*\.[02]\.(self_attn\.[kv]_proj|mlp\.(up|down)_proj)")


@pytest.mark.parametrize("selection", usual([LAYERS, EXPRESSION], 1), ids=["layers", "expression"])
@pytest.mark.parametrize(
    "parallel", usual([dict(pp=2, vpp=2), {}, dict(tp=2, sequence_parallel=True), dict(pp=2)], 0), ids=str
)
def test_so_are_those_of_some_modules_in_some_layers(parallel, selection, tmp_path):
    """A pipeline stage may then have no adapter at all."""
    made = tmp_path / "peft", *run_ranks(partial(make_with_peft, **selection), 1, tmp_path / "peft")[0]
    assert_as_peft(parallel, made, tmp_path, selection)
    saved, theirs = (json.loads((tmp_path / of / "adapter_config.json").read_text()) for of in ("out", "peft/adapter"))
    for key in ("target_modules", "layers_to_transform"):
        ours, expected = ({*value} if isinstance(value, list) else value for value in (saved[key], theirs[key]))
        assert ours == expected, key


def assert_as_peft(parallel, made, tmp_path, selection=None):
    root, gradients, merged, _ = made
    ranks = parallel.get("tp", 1) * parallel.get("pp", 1)
    found = run_ranks(_step, ranks, root, parallel, tmp_path / "out", selection)
    ours, exported = found[0][:2]
    assert ours.keys() == gradients.keys() and max(relative_error(ours[n], g) for n, g in gradients.items()) < 2e-5
    assert max(relative_error(exported[n], merged[n]) for n in exported) < 1e-6
    assert (
        load_file(tmp_path / "out/adapter_model.safetensors").keys()
        == load_file(root / "adapter/adapter_model.safetensors").keys()
    )
    for name, tensor in load_file(root / "adapter/adapter_model.safetensors").items():
        assert torch.equal(load_file(tmp_path / "out/adapter_model.safetensors")[name], tensor)
    # Frozen weights have no gradient, no buffer and no optimizer state.
    for _, _, clean, held, buffers in found:
        assert clean and held <= buffers <= 2 * held


def _checkpoint(root, parallel, folder, load, selection=None):
    lora = dict(adapter_path=str(root / "adapter")) | (selection or {})
    config, layout, hf_config, policy, batch = prepare(root, parallel, **lora)
    checkpointer = Checkpointer(folder, layout, policy, 1, root / "model")
    if load:
        checkpointer.load(newest_checkpoint(checkpointer.folder))
    else:
        policy.train_step(batch, make_loss(config.algorithm), batch.num_tokens)
        save_now(checkpointer, TrainState(step=1, weight_version=1, cursor=1))
    policy.train_step(batch, make_loss(config.algorithm), batch.num_tokens)
    return whole_tensors(policy, hf_config, layout, lambda p: p.data)[0]


def test_a_run_with_fused_adapters_continues_in_another_layout(made_fused, tmp_path):
    assert_resumes(made_fused[0], dict(tp=2), {}, tmp_path)


@pytest.mark.full
def test_so_does_a_run_whose_first_stage_has_no_adapters(tmp_path):
    run_ranks(partial(make_with_peft, **LAYERS), 1, tmp_path / "peft")
    assert_resumes(tmp_path / "peft", dict(pp=2), dict(tp=2), tmp_path / "checkpoints", LAYERS)


def assert_resumes(root, saved, loaded, folder, selection=None):
    unbroken, resumed = (
        run_ranks(_checkpoint, 2 if parallel else 1, root, parallel, folder, load, selection)[0]
        for load, parallel in enumerate((saved, loaded))
    )
    assert (
        unbroken.keys() == resumed.keys()
        and max(relative_error(resumed[name], tensor) for name, tensor in unbroken.items()) < 1e-6
    )


def _read_with_peft(root, adapter, renamed=False):
    import transformers
    from peft import PeftModel

    model = transformers.AutoModelForCausalLM.from_pretrained(root / "model")
    if renamed:
        with under_another_name(model):
            model = PeftModel.from_pretrained(model, adapter)
    else:
        model = PeftModel.from_pretrained(model, adapter)
    with torch.no_grad():
        return torch.cat([model(sample.token_ids[None]).logits[0] for sample in samples()])


def test_peft_reads_what_we_write_and_computes_the_same(made, tmp_path):
    root, *_, logits = made
    run_ranks(_step, 2, root, dict(tp=2), tmp_path / "out")
    assert torch.equal(run_ranks(_read_with_peft, 1, root, tmp_path / "out")[0], logits)
    lora = read_lora(tmp_path / "out")
    assert (lora.rank, lora.alpha) == (4, 20.0) and set(lora.names) == set(read_lora(root / "adapter").names)


def _fresh(root, parallel):
    _, layout, hf_config, policy, batch = prepare(root, parallel)
    reference = Reference(policy)
    start = policy.logprobs(batch)
    adapters, _, _ = whole_tensors(policy, hf_config, layout, lambda p: p.data)
    with torch.no_grad():
        for _, param, _ in adapter_blocks(policy.chunks, hf_config, layout):
            param.add_(0.1)
    moved, ref = policy.logprobs(batch), reference.logprobs(batch)
    copied = sum(w.numel() for w in reference.weights)
    trained = sum(p.numel() for c in policy.chunks for p in c.parameters() if p.requires_grad)
    same, still = ([torch.equal(a, b) for a, b in zip(start, rows, strict=True)] for rows in (ref, moved))
    return adapters, same, still, copied == trained


def test_a_fresh_adapter_adds_nothing_starts_alike_everywhere_and_the_reference_is_the_model(made):
    root = made[0]
    alone, together = run_ranks(_fresh, 1, root, {})[0], run_ranks(_fresh, 2, root, dict(tp=2))[0]
    assert all(torch.equal(alone[0][name], together[0][name]) for name in alone[0])
    for name, tensor in alone[0].items():
        assert torch.equal(tensor, fresh_matrix(name, tuple(tensor.shape), 5).double()) and (
            "lora_B" not in name or not tensor.any()
        )
    for _, same, moved, copied in (alone, together):
        assert all(same) and not any(moved) and copied


def _dropout(root, parallel):
    config, layout, hf_config, policy, batch = prepare(root, parallel, adapter_path=str(root / "adapter"), dropout=0.3)
    same = all(torch.equal(a, b) for a, b in zip(policy.logprobs(batch), policy.logprobs(batch), strict=True))
    runs = []
    for _ in range(2):
        policy.backward(batch, make_loss(config.algorithm), batch.num_tokens)
        gradients, apart, _ = whole_tensors(policy, hf_config, layout, lambda p: p.main_grad)
        runs.append(gradients)
    return same, apart, max((relative_error(runs[0][n], g) for n, g in runs[1].items()), default=1.0)


@pytest.mark.parametrize("parallel", usual([dict(tp=2), dict(tp=2, sequence_parallel=True)], 0), ids=str)
def test_dropout_drops_the_same_on_all_ranks_and_only_in_training(parallel, made):
    same, apart, change = run_ranks(_dropout, 2, made[0], parallel)[0]
    assert same and apart == 0 and change > 0.05


BROKEN = {
    "lora.rank: 5, but the adapter in .* has 4; set it to 4": (dict(rank=5), {}),
    "lora.alpha: 20.0, but the adapter in .* has 6.0": ({}, dict(lora_alpha=3)),
    "has use_dora True; only LoRA of one rank": ({}, dict(use_dora=True)),
    "has bias all; only LoRA of one rank": ({}, dict(bias="all")),
    "has peft_type LOHA": ({}, dict(peft_type="LOHA")),
    "lora.target_modules: .*lora_A.weight is only in the model": ({}, {}),  # a tensor is missing
    "lora.adapter_path: .* has shape": ({}, {}),  # a tensor is truncated
}


def _refused(root, folder) -> None:
    _, layout, hf_config, policy, _ = prepare(root, {})
    for number, (message, (lora, in_file)) in enumerate(BROKEN.items()):
        broken = folder / str(number)
        broken.mkdir()
        tensors = load_file(root / "adapter/adapter_model.safetensors")
        first = min(tensors)
        if "only in the model" in message:
            del tensors[first]
        elif "has shape" in message:
            tensors[first] = tensors[first][:, :-1].contiguous()
        save_file(tensors, broken / "adapter_model.safetensors")
        saved = json.loads((root / "adapter/adapter_config.json").read_text()) | in_file
        (broken / "adapter_config.json").write_text(json.dumps(saved))
        with pytest.raises(ValueError, match=message):
            load_adapter(policy.chunks, hf_config, layout, broken, LoraSection(**LORA | lora))
    with pytest.raises(ValueError, match=r"has no adapter_config\.json; name an adapter folder of PEFT"):
        load_adapter(policy.chunks, hf_config, layout, root / "model", LoraSection(**LORA))


def test_an_adapter_that_does_not_fit_is_refused(made, tmp_path):
    run_ranks(_refused, 1, made[0], tmp_path)


def _merge_into(folder, adapter) -> None:
    layout = init_layout(ParallelSection(tp=2))
    with pytest.raises(ValueError if layout.world_rank == 0 else RankError, match="exists and is not empty"):
        merge(adapter, folder, str(folder / "nowhere"), layout)


def test_a_merge_into_a_folder_with_files_is_refused_before_the_model_is_read(made, tmp_path):
    (tmp_path / "file").touch()
    run_ranks(_merge_into, 2, tmp_path, made[0] / "adapter")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
