"""What is shown of a family, on its tiny models: logits and exports against transformers, and steps against one process.
Tests and `prove_family.py` share it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tiny_families import EVERY, has_experts, on_one_stage, tiny_model, write_model

from megagrpo.config import ParallelSection
from megagrpo.families.hf_config import load_hf_config
from megagrpo.platform.parallel.layout import init_layout
from megagrpo.policy.attention.packed import pack_params
from megagrpo.policy.build import build_model, head_input, hidden_states, lm_head
from megagrpo.policy.transformer.transformer_config import ModelOptions
from megagrpo.weights.bridge.hf_export import save_hf
from megagrpo.weights.bridge.load import load_hf
from tests.family_examples import TINY_SIZES

# lengths of the sequences in each micro-batch; both have an even sum, as sequence parallelism requires
PACKS = ([7, 40, 1, 12], [30])
Sizes = dict[str, Any]  # of ParallelSection
DENSE_LAYOUTS: list[Sizes] = [
    dict(tp=2),
    dict(tp=2, pp=2, sequence_parallel=True),
    dict(pp=2, vpp=2),
    dict(pp=2, pipeline_layers=[1, 3]),
]
ONE_STAGE_LAYOUTS: list[Sizes] = [dict(tp=2), dict(tp=2, sequence_parallel=True)]
EXPERT_LAYOUTS: list[Sizes] = [
    dict(tp=2, sequence_parallel=True),
    dict(tp=2, ep=2, sequence_parallel=True),
    dict(tp=2, ep=2, etp=1, sequence_parallel=True),
    dict(pp=2, ep=2),
    dict(pp=2, vpp=2),
]


def layouts_of(name: str) -> list[Sizes]:
    """The layouts of more than one rank in which a case's logits are compared."""
    if on_one_stage(name):
        return ONE_STAGE_LAYOUTS
    return EXPERT_LAYOUTS if has_experts(name) else DENSE_LAYOUTS


def make_models(root: Path, names: list[str]) -> dict[str, list]:
    """Write the models below `root`; name -> logits [T, V] by transformers for each pack, one sequence at a time."""
    logits = {}
    for name in names:
        model = tiny_model(*EVERY[name])
        with torch.no_grad():
            logits[name] = [
                torch.cat([model(s[None]).logits[0] for s in tokens.split(lengths)]).numpy()
                for tokens, _, lengths in packs(TINY_SIZES["vocab_size"])
            ]
        write_model(model, root / name)
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
    """This rank's chunks of the model in `folder`, and its architecture."""
    hf_config = load_hf_config(folder)
    chunks = build_model(hf_config, layout, ModelOptions(dtype=torch.float32, init_weights=False, **options))
    for chunk in chunks:
        for p in chunk.parameters():
            p.data.fill_(float("nan"))  # shows every parameter that loading misses
    load_hf(chunks, hf_config, folder, layout)
    return chunks, hf_config


def check_model(folder: Path, out: Path, sizes: Sizes, limit: int):
    """Logits by the model's own head, logits by hand from hidden states, and an export of the weights."""
    layout = init_layout(ParallelSection(**sizes))
    try:
        chunks, hf_config = load_in(layout, folder, sequence_parallel=sizes.get("sequence_parallel", False))
        own = [logits[0] for logits in forward(chunks, hf_config)]
        with hidden_states(chunks):
            by_hand = [head_input(chunks[-1], hidden) @ lm_head(chunks[-1]).T for hidden in forward(chunks, hf_config)]
        if cap := hf_config.logit_cap:
            by_hand = [cap * torch.tanh(logits / cap) for logits in by_hand]
        save_hf(chunks, hf_config, layout, out, folder, max_shard_bytes=limit)
    finally:
        layout.close()
    return [o.numpy() for o in own], [b.detach().numpy() for b in by_hand]


def check_models(root: Path, out: Path, names: list[str], sizes: Sizes, limit: int):
    """`check_model` for several models in the same processes."""
    return {name: check_model(root / name, out / name, sizes, limit) for name in names}


def num_ranks(sizes: Sizes) -> int:
    """The smallest number of ranks for these sizes."""
    return ParallelSection(**sizes).smallest_world


def whole(per_rank, tp: int, pack: int) -> torch.Tensor:
    """Join the vocabulary shards of the last stage, whose ranks come last, and drop the padding."""
    return torch.cat([torch.from_numpy(shards[pack]) for shards in per_rank[-tp:]], -1)[:, : TINY_SIZES["vocab_size"]]


def largest_difference(per_rank, expected: list, sizes: Sizes) -> float:
    """The largest difference of a logit, by the model's head and by hand, from those in `expected`."""
    pairs = [
        (whole([r[way] for r in per_rank], sizes.get("tp", 1), i), e) for way in (0, 1) for i, e in enumerate(expected)
    ]
    return max((found - reference).abs().max().item() for found, reference in pairs)


def differing_tensors(folder: Path, out: Path) -> list[str]:
    """Names of tensors and files whose bytes differ between a folder and its export."""
    source, made = read_folder(folder), read_folder(out)
    wrong = [name for name in source.keys() | made.keys() if not _same(source.get(name), made.get(name))]
    config = (out / "config.json").read_bytes() != (folder / "config.json").read_bytes()
    return sorted(wrong) + ["config.json"] * config


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is not None and other is not None and one.dtype == other.dtype and torch.equal(one, other)


def read_folder(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder; asserts that the index, if any, names the right files."""
    files = {file.name: load_file(file) for file in folder.glob("*.safetensors")}
    if (index := folder / "model.safetensors.index.json").exists():
        weight_map = json.loads(index.read_text())["weight_map"]
        assert weight_map == {name: file for file, tensors in files.items() for name in tensors}
        assert len(files) > 1
    return {name: tensor for tensors in files.values() for name, tensor in tensors.items()}
