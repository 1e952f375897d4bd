"""Run every proof of a family and print a table: python -m tests.prove_family NAME [NAME ...] [--skip PROOF] [--write]

NAME is a model_type of megagrpo/families. Proofs: keys, logits, checkpoint, step, adapters, fp8, vllm. The
models that they use are in tests/data/families/NAME.json. With --write the results go to docs/families.json. Exit code 1: a proof failed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.family_examples import EXAMPLES

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "families.json"
os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
sys.path.insert(0, str(ROOT / "tests" / "distributed"))
Found = dict[str, Any]  # what a proof measured, for docs/families.json


def keys(kind: str) -> Found:
    """Each key of config.json changes our logits as it changes transformers', or is refused."""
    from ranks import run_ranks
    from test_config_keys import FIRST, wrongly_loaded
    from tiny_policy import release_of

    from megagrpo.families.config_keys import architecture_problems

    assert not (problems := architecture_problems(release_of(kind))), problems
    with tempfile.TemporaryDirectory() as folder:
        ((wrong, telling),) = run_ranks(wrongly_loaded, 1, FIRST[kind], Path(folder), False, timeout=600)
    assert not wrong, "\n".join(wrong)
    return dict(keys=len(telling))


def logits(kind: str) -> Found:
    """Logits in float32, alone and in layouts, equal transformers'; an export has the bytes of its source."""
    import torch
    from family_proofs import check_model, differing_tensors, largest_difference, layouts_of, make_models, num_ranks
    from ranks import run_ranks
    from tiny_families import cases_of

    from megagrpo.families.family_index import FAMILIES

    example, worst, layouts = EXAMPLES[kind], 0.0, set()
    with tempfile.TemporaryDirectory() as folder:
        root, names = Path(folder), cases_of(FAMILIES[kind])
        (theirs,) = run_ranks(make_models, 1, root, names)
        for name in names:
            expected = [torch.from_numpy(pack) for pack in theirs[name]]
            for i, sizes in enumerate([{}, *layouts_of(name)]):
                out = root / f"{name} {i}"
                results = run_ranks(check_model, num_ranks(sizes), root / name, out, sizes, 100_000 if i else 10**9)
                worst = max(worst, error := largest_difference(results, expected, sizes))
                assert error <= example.tolerance, f"{name} in {sizes}: logits off by {error:.1e}"
                assert not (wrong := differing_tensors(root / name, out)), f"{name} in {sizes}: {wrong} differ"
                layouts.add(_text(sizes))
    return dict(logits=float(f"{worst:.1e}"), cases=names, layouts=sorted(layouts))


def checkpoint(kind: str) -> Found:
    """Through Megatron's checkpoint in one layout, and back in another, no byte changes."""
    from ranks import run_ranks
    from test_convert import assert_round_trips, make_models, pairs_of
    from tiny_families import cases_of

    from megagrpo.families.family_index import FAMILIES

    with tempfile.TemporaryDirectory() as models, tempfile.TemporaryDirectory() as scratch:
        family = FAMILIES[kind]
        cases = EXAMPLES[kind].cases
        names = [next(iter(cases)), *cases_of(family)[len(cases) :]]
        run_ranks(make_models, 1, Path(models), names)
        pairs = [pair for name in names for pair in pairs_of(name, 4)]
        assert_round_trips(Path(models), Path(scratch), pairs, 4)
    return dict(conversions=len(pairs))


def step(kind: str) -> Found:
    """A training step in layouts that cut every dimension equals one process's."""
    from family_steps import layouts_of, step_error
    from tiny_policy import shapes_of

    errors = {
        " ".join((shape,) * (shape != kind) + (_text(layout),)): step_error(shape, layout)
        for shape in shapes_of(kind)
        for layout in layouts_of(shape)
    }
    assert max(errors.values()) <= 1, f"errors over tolerance: {errors}"
    return dict(step=list(errors))


def adapters(kind: str) -> Found:
    """So does a step of LoRA's adapters."""
    from family_steps import adapter_error
    from tiny_policy import shapes_of

    assert (error := max(map(adapter_error, shapes_of(kind)))) <= 1, f"error over tolerance: {error:.1f}"
    return dict(lora=True)


def fp8(kind: str) -> Found:
    """And a step whose linears multiply in FP8, within the rounding of FP8."""
    from family_steps import fp8_rounding

    rounding = fp8_rounding(kind)
    return dict(fp8="refused" if rounding is None else float(f"{rounding:.1e}"))


def vllm(kind: str) -> Found:
    """A server gets the weights from Megatron's shards, and both compute the same log-probs."""
    from tiny_families import cases_of

    from megagrpo.families.family_index import FAMILIES
    from tests.e2e.test_families_vllm import SERVED, reach_vllm

    example, differences = EXAMPLES[kind], {}
    for name in filter(SERVED.__contains__, cases_of(FAMILIES[kind])):
        differences[name] = float(f"{reach_vllm(name):.1e}")
    assert max(differences.values(), default=0) <= 1e-4, differences
    return dict(vllm=differences, unserved=dict(example.unserved))


PROOFS: dict[str, Callable[[str], Found]] = {
    proof.__name__: proof for proof in (keys, logits, checkpoint, step, adapters, fp8, vllm)
}


def _text(sizes: dict[str, Any]) -> str:
    return ",".join(key if value is True else f"{key}={value}" for key, value in sizes.items()) or "one process"


def prove(kind: str, skip: list[str]) -> tuple[Found, bool]:
    """Run the proofs of one family; return what they measured, and whether all passed."""
    found: Found = dict(versions={name: version(name) for name in ("torch", "transformers", "megatron-core")})
    seconds: dict[str, float] = {}
    passed = True
    for name, proof in PROOFS.items():
        if name in skip:
            continue
        started = time.monotonic()
        try:
            measured = proof(kind)
            found |= measured
            result = ", ".join(f"{key} {_short(value)}" for key, value in measured.items())
        except Exception:
            passed, result = False, "FAILED"
            traceback.print_exc()
        seconds[name] = round(time.monotonic() - started, 1)
        print(f"{kind:18} {name:10} {seconds[name]:6.1f} s  {result}", flush=True)
    return found | dict(seconds=seconds), passed


def _short(value: Any) -> str:
    return str(len(value)) if isinstance(value, list) else str(value)


def main() -> int:
    """Prove the families of the command line; return the exit code."""
    parser = argparse.ArgumentParser("prove_family", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("families", nargs="+", metavar="NAME", help="model_type of a family")
    parser.add_argument("--skip", action="append", default=[], choices=PROOFS, help="proof to leave out")
    parser.add_argument("--only", action="append", choices=PROOFS, help="proof to run, and no other")
    parser.add_argument("--write", action="store_true", help="write the results to docs/families.json")
    options = parser.parse_args()
    import transformers

    from megagrpo.families.family_index import FAMILIES

    if unknown := [name for name in options.families if name not in FAMILIES]:
        parser.error(f"no family {unknown[0]}; families: {', '.join(FAMILIES)}")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    warnings.simplefilter("ignore", FutureWarning)  # torch's, of names that Megatron uses
    skip = [name for name in PROOFS if name in options.skip or (options.only and name not in options.only)]
    everything = True
    for kind in options.families:
        getattr(transformers, FAMILIES[kind].architecture)  # transformers imports on first use: once, not in every fork
        found, passed = prove(kind, skip)
        everything &= passed
        if options.write and passed:
            results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
            results[kind] = _merged(results.get(kind, {}), found)
            RESULTS.write_text(json.dumps(dict(sorted(results.items())), indent=1) + "\n")
    return 0 if everything else 1


def _merged(before: Found, found: Found) -> Found:
    return before | found | dict(seconds=before.get("seconds", {}) | found["seconds"])


if __name__ == "__main__":
    sys.exit(main())
