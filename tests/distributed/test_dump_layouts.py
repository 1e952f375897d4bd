"""Steps dumped from many layouts, audited: what each rank has seen comes together as one step that float64 agrees with."""

import random

import pytest
from ranks import run_ranks
from tiny_policy import SHAPES, tiny_model, tiny_run

from megagrpo.__main__ import main
from megagrpo.algorithms.advantages import group_advantages, rewards_by_group, to_samples
from megagrpo.algorithms.losses import make_loss
from megagrpo.algorithms.reductions import denominator
from megagrpo.bridge.load import load_hf
from megagrpo.data.packing import pack, packing_rules
from megagrpo.dump import StepDumps
from megagrpo.parallel.layout import init_layout
from megagrpo.policy.hf_config import load_hf_config
from megagrpo.policy.megatron_policy import MegatronPolicy
from megagrpo.policy.reference import Reference
from megagrpo.types import Prompt, Rollout, ScoredRollout
from megagrpo.verify.shrink import random_samples

LAYOUTS = {
    "tp2 dp2": (4, "llama_tied", dict(tp=2, sequence_parallel=True), dict(algorithm=dict(kl_estimator="k1", beta=0.5), train={})),
    "pp2 vpp2": (2, "qwen2_untied", dict(pp=2, vpp=2), dict(algorithm=dict(loss_type="dapo"))),
    "cp2 dp2": (4, "qwen3_tied", dict(cp=2), dict(algorithm=dict(kl_estimator="full_forward", beta=0.5))),
    "ep2": (2, "qwen3_moe", dict(ep=2), dict(algorithm=dict(router_aux_loss_coef=0.1))),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of tiny models, by shape."""
    root = tmp_path_factory.mktemp("models")
    run_ranks(_make_models, 1, root)
    return root


def _make_models(root):
    import torch
    import transformers

    for shape in {shape for _, shape, *_ in LAYOUTS.values()}:
        assert shape in SHAPES
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**tiny_model(shape).raw))
        for parameter in model.parameters():
            parameter.data.add_(0.1 * torch.randn_like(parameter))
        model.save_pretrained(root / shape)


def rollouts():
    """The samples of `megagrpo verify` as an engine would give them, with rewards by chance."""
    chance = random.Random(1)
    made = []
    for i, sample in enumerate(random_samples()):
        ids = sample.token_ids.tolist()
        length = int((~sample.response_mask).sum())
        prompt = Prompt(i, tuple(ids[:length]), "a question", {})
        logprobs = tuple(sample.rollout_logprobs[length:].tolist())
        reward = chance.random()
        made.append(ScoredRollout(Rollout(prompt, tuple(ids[length:]), logprobs, "stop", 1, "an answer"), {"chance": reward}, reward))
    return made


def _dump_two_steps(name, model, run):
    _, _, parallel, sections = LAYOUTS[name]
    named = dict(rewards=dict(functions=[dict(function="nowhere:chance")]), model=dict(tokenizer="/nowhere"))
    settings = tiny_run(parallel, debug=dict(dump_steps=[1, 2]), **named, **sections)
    layout, hf = init_layout(settings.parallel), load_hf_config(model)
    policy = MegatronPolicy(settings, layout, hf)
    load_hf(policy.chunks, hf, model, layout)
    policy.weights_changed()
    reference = Reference(policy)
    scored, said = rollouts(), []
    advantages = group_advantages(rewards_by_group(scored, settings.rollout.num_generations), "group")
    batch = pack(to_samples(scored, advantages), packing_rules(settings, policy.shares_prompts), layout.dp_rank, layout.dp_size)
    batch = reference.annotate(batch)
    divisor = denominator(batch, settings.algorithm.loss_type, settings.rollout.max_completion_length)
    dumps = StepDumps(settings, policy, run / "dumps", model, said.append)
    for step in (1, 2):
        dumps.begin(step)
        metrics = policy.train_step(batch, dumps.record(make_loss(settings)), divisor)
        dumps.measured(metrics, divisor)
        dumps.finish(scored, advantages.flatten().tolist())
    return said


def _audit(run, step):
    return main(["audit", str(run), "--step", str(step)])


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_steps_of_this_layout_agree_with_float64(name, models, tmp_path, capfd):
    ranks, shape, *_ = LAYOUTS[name]
    said = run_ranks(_dump_two_steps, ranks, name, models / shape, tmp_path)
    assert said[0] == [f"dump {tmp_path / 'dumps' / f'step_00000{step}'}" for step in (1, 2)]
    for step in (1, 2):
        assert run_ranks(_audit, 1, tmp_path, step) == [0], capfd.readouterr().out
    assert (tmp_path / "dumps" / "step_000002" / "weights_1" / "model.safetensors").exists()
