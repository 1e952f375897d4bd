"""Steps dumped from many layouts, audited: the ranks' parts combine to one step that float64 agrees with."""

import pytest
from dumped_steps import FUNCTIONS, dump_step, make_model
from ranks import run_ranks
from tiny_policy import tiny_model, tiny_run

from megagrpo.__main__ import main
from megagrpo.platform.parallel.layout import init_layout

LAYOUTS = {
    "tp2 dp2": (
        4,
        "llama_tied",
        dict(tp=2, sequence_parallel=True),
        dict(algorithm=dict(kl_estimator="k1", beta=0.5), train={}),
    ),
    "pp2 vpp2": (2, "qwen2_untied", dict(pp=2, vpp=2), dict(algorithm=dict(loss_type="dapo"))),
    "cp2 dp2": (4, "qwen3_tied", dict(cp=2), dict(algorithm=dict(kl_estimator="full_forward", beta=0.5))),
    "gemma2 tp2 cp2": (
        4,
        "gemma2",
        dict(tp=2, cp=2),
        dict(algorithm=dict(kl_estimator="full_reverse", beta=0.5, entropy_coef=0.1)),
    ),
    "gemma3 pp2": (2, "gemma3", dict(pp=2), dict(algorithm=dict(beta=0.5))),
    "ep2": (2, "qwen3_moe", dict(ep=2), dict(algorithm=dict(router_aux_loss_coef=0.1))),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of tiny models, by shape."""
    root = tmp_path_factory.mktemp("models")
    run_ranks(_make_models, 1, root)
    return root


def _make_models(root):
    for shape in {shape for _, shape, *_ in LAYOUTS.values()}:
        make_model(root / shape, tiny_model(shape))


def _dump_two_steps(name, model, run):
    _, _, parallel, sections = LAYOUTS[name]
    named = dict(rewards=dict(functions=FUNCTIONS), model=dict(tokenizer="/nowhere"))
    config = tiny_run(parallel, debug=dict(dump_steps=[1, 2]), **named, **sections)
    return dump_step(config, init_layout(config.parallel), model, run, (1, 2))


def audit(run, step):
    return main(["audit", str(run), "--step", str(step)])


@pytest.mark.full
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_steps_of_this_layout_agree_with_float64(name, models, tmp_path, capfd):
    ranks, shape, *_ = LAYOUTS[name]
    said = run_ranks(_dump_two_steps, ranks, name, models / shape, tmp_path)
    assert said[0] == [f"dump {tmp_path / 'dumps' / f'step_00000{step}'}" for step in (1, 2)]
    for step in (1, 2):
        assert run_ranks(audit, 1, tmp_path, step) == [0], capfd.readouterr().out
    assert (tmp_path / "dumps" / "step_000002" / "weights_1" / "model.safetensors").exists()
