"""The blocks of every rank of a layout, computed in one process, equal the blocks of real ranks. Also: plans for random
layouts."""

import itertools
import random
from collections import defaultdict
from itertools import combinations, pairwise

import pytest
import torch
from ranks import run_ranks
from suites import usual
from tiny_families import MODELS, cases_of, tiny_config
from tiny_policy import SHAPES

from benchmarks.scaling.loader_slices import EngineLayout, wanted_boxes
from benchmarks.scaling.planned_blocks import held_boxes
from megagrpo.config import ParallelSection
from megagrpo.families.config_keys import architecture_problems
from megagrpo.families.family_index import FAMILIES
from megagrpo.families.hf_config import model_problems, parse_hf_config
from megagrpo.families.shared.boxes import intersect, missing, size, whole
from megagrpo.platform.parallel.layout import init_layout
from megagrpo.policy.build import build_model
from megagrpo.policy.transformer.transformer_config import ModelOptions
from megagrpo.proof.verify.shrink import shrink_model
from megagrpo.weights.blocks.parameter_blocks import blocks, tensor_names
from megagrpo.weights.slices.sync_plan import plan_transfers
from tests.family_examples import TINY_SIZES

FIRST = [cases_of(family)[0] for family in FAMILIES.values()]


def boxes_here(shape, parallel):
    """The blocks that a real rank holds."""
    section = ParallelSection(**parallel)
    layout, model = init_layout(section), shrink_model(SHAPES[shape], section)
    chunks = build_model(model, layout, ModelOptions(dtype=torch.float32))
    found = {(block.name, block.shape, block.box) for _, _, held in blocks(chunks, model, layout) for block in held}
    layout.close()
    return found


def boxes_told(shape, parallel, world_size):
    section = ParallelSection(**parallel)
    alone = init_layout(ParallelSection())
    shapes, held = held_boxes(shrink_model(SHAPES[shape], section), section, world_size, alone)
    alone.close()
    return [
        {(name, shapes[name], box) for name, boxes in held.items() for box in boxes if rank in boxes[box]}
        for rank in range(world_size)
    ]


@pytest.mark.parametrize(
    ("shape", "ranks", "parallel"),
    usual(
        [
            ("qwen3_moe", 8, dict(tp=2, pp=2, ep=2, etp=1, pipeline_layers=[1, 2])),
            ("mixtral", 4, dict(tp=2, ep=2, etp=2)),
            ("llama_tied", 4, dict(pp=2, vpp=2)),
            ("qwen2_untied", 6, dict(tp=3, cp=2)),
        ],
        0,
    ),
    ids=str,
)
def test_each_rank_holds_what_it_is_said_to_hold(shape, ranks, parallel):
    told = run_ranks(boxes_told, 1, shape, parallel, ranks)[0]
    for rank, found in enumerate(run_ranks(boxes_here, ranks, shape, parallel)):
        assert found == told[rank], f"rank {rank}"


def random_case(name, rng):
    """(model, parallel, ranks, engine): a random layout of a small model with random sizes, and a random layout of an
    engine."""
    kind, extra = MODELS[name]
    sizes = dict(
        num_key_value_heads=rng.choice([1, 2, 3, 6]),
        num_hidden_layers=rng.randrange(3, 9),
        intermediate_size=24 * rng.randrange(1, 5),
        vocab_size=rng.randrange(50, 300),
    )
    if any(isinstance(value, list) and len(value) == TINY_SIZES["num_hidden_layers"] for value in extra.values()):
        del sizes["num_hidden_layers"]
    raw = tiny_config(kind, sizes | extra).to_dict()
    # `extra` fits only the sizes that it was made for
    if architecture_problems(raw) or model_problems(parse_hf_config(raw), ParallelSection()):
        raw = tiny_config(kind, extra).to_dict()
    model = parse_hf_config(raw)
    layers = model.num_layers
    assert not model_problems(model, ParallelSection()), name
    while True:
        tp, pp, cp, copies = (
            rng.choice([1, 2, 3, 4]),
            rng.choice([1, 2, 3, 4]),
            rng.choice([1, 1, 2]),
            rng.choice([1, 2, 4]),
        )
        vpp = rng.choice([1, 1, 2]) if pp > 1 else 1
        parallel = dict(tp=tp, pp=pp, vpp=vpp, cp=cp, ep=rng.choice([1, 2, 4]), etp=rng.choice([None, 1, 2, 3]))
        edges = sorted(rng.choices(range(layers + 1), k=pp * vpp - 1))
        stages = [b - a for a, b in pairwise([0, *edges, layers])]
        parallel["pipeline_layers"] = stages if min(stages) else None
        section = ParallelSection(**parallel)
        ranks = tp * pp * cp * copies
        if ranks % section.expert_parallel_size == 0 and not model_problems(model, section):
            break
    engine_tp = rng.choice([n for n in (1, 2, 4, 8) if model.num_heads % n == 0])
    ep = rng.choice([1, engine_tp, 2 * engine_tp]) if model.experts else 1
    return model, section, ranks, EngineLayout(engine_tp, rng.choice([1, 2, 3]), ep, rng.choice([1, 2, 3]))


def check_random_layouts(seeds, names):
    """Assert all properties of layouts of these models; return the families with a valid engine layout."""
    alone, met = init_layout(ParallelSection()), set()
    for name, seed in itertools.product(names, seeds):
        model, parallel, ranks, engine = random_case(name, random.Random(f"{name} {seed}"))
        case = f"{name}, seed {seed}: {parallel}, {engine}"
        shapes, held = held_boxes(model, parallel, ranks, alone)
        assert held.keys() == tensor_names(model) - ({"lm_head.weight"} if model.tied_embeddings else set()), case
        for tensor, boxes in held.items():
            full = whole(shapes[tensor])
            assert missing(full, boxes) == [] and sum(map(size, boxes)) == size(full), f"{case}: {tensor}"
            assert all(len(set(holders)) == len(holders) and max(holders) < ranks for holders in boxes.values()), (
                f"{case}: {tensor}"
            )
        try:
            wanted = wanted_boxes(shapes, model, engine)
        except ValueError as error:
            assert "rollout.tp" in str(error), case
            continue
        check_arrivals(plan_transfers(held, wanted), held, wanted, case)
        met.add(model.family)
    alone.close()
    return met


def check_arrivals(made, held, wanted, case):
    arrived = defaultdict(list)
    for tensor, box, source, worker in zip(made.tensor, made.box, made.source, made.destination, strict=True):
        name, part = made.names[tensor], made.boxes[box]
        assert any(source in ranks and intersect(part, block) == part for block, ranks in held[name].items()), (
            f"{case}: {name} from {source}"
        )
        arrived[name, worker].append(part)
    needed = defaultdict(list)
    for name, boxes in wanted.items():
        for box, workers in boxes.items():
            for worker in workers:
                needed[name, worker].append(box)
    assert arrived.keys() == needed.keys(), case
    for place, parts in arrived.items():
        boxes = needed[place]
        assert all(missing(box, parts) == [] for box in boxes) and sum(map(size, parts)) == sum(map(size, boxes)), (
            f"{case}: {place}"
        )
        assert not any(intersect(a, b) for a, b in combinations(parts, 2)), f"{case}: {place}"


@pytest.mark.parametrize("names", usual([FIRST, MODELS], 0), ids=["first", "all"])
def test_plans_of_random_layouts_move_each_wanted_element_once_from_a_rank_that_holds_it(names):
    assert run_ranks(check_random_layouts, 1, range(1), [*names], timeout=300)[0] == set(FAMILIES)
