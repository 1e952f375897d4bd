"""Runs on the responses of rows: their losses in every layout, their naive value, and what a stop and a resume keep."""

import io
import json
import math
from contextlib import redirect_stderr, redirect_stdout

import pytest
import torch
from ranks import run_ranks

from megagrpo.__main__ import main
from tests.e2e import world
from tests.unit.for_each import for_each

ROWS = ("rewards.functions=[]", "run.max_steps=3", "rollout.num_generations=8")
TURNS = [
    [("user", "2 + 2?"), ("assistant", "4"), ("user", "and 3 + 3?"), ("assistant", "6")],
    [("system", "Add."), ("user", "7 + 1"), ("assistant", "8, I think")],
    [("user", "9 + 9"), ("assistant", "18")],
    [("user", "a" * 60), ("assistant", "b" * 30)],
]


def _train(words: list[str]) -> tuple[int, str]:
    torch.distributed.destroy_process_group()  # the command makes its own
    said = io.StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        code = main(["train", *words])
    return code, said.getvalue()


def train(output, ranks, *words):
    """A run on rows in this layout: its lines in metrics.jsonl, and its output."""
    own = world.arguments(output, *ROWS, *words, launched=True)
    (code, said), *_ = run_ranks(_train, ranks, own)
    assert code == 0, said
    return [json.loads(line) for line in (output / "run" / "metrics.jsonl").read_text().splitlines()], said


def losses(lines):
    return [value for line in lines for name, value in line.items() if name in ("loss", "eval/loss")]


CONVERSATIONS = [{"messages": [{"role": role, "content": text} for role, text in turns]} for turns in TURNS * 2]
PAIRS = [dict(prompt=f"{a} + {a}?", chosen=f"{2 * a}", rejected=f"{3 * a}, or so") for a in range(3, 11)]
LABELED = [dict(prompt=f"{a} + {a}?", completion=f"{2 * a + a % 2}", label=a % 2 == 0) for a in range(3, 11)]
METHODS = {  # the rows of a method and its words
    "sft": (CONVERSATIONS, "algorithm.loss_type=sft"),
    "dpo": (PAIRS, "algorithm.loss_type=sigmoid", "algorithm.beta=0.3"),
    "reward": (PAIRS, "algorithm.loss_type=bradley_terry", "data.shuffle=false"),
    "kto": (LABELED, "algorithm.loss_type=kto", "algorithm.beta=0.3"),
    "adapters": (PAIRS, "algorithm.loss_type=bradley_terry", "lora.rank=4", "train.learning_rate=1e-2"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Of each method its words, and three steps of one rank: the folder, the lines of metrics and the output."""
    found = {}
    for method, (rows, *words) in METHODS.items():
        output = tmp_path_factory.mktemp(method)
        (output / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        source = f"source: {output / 'rows.jsonl'}"
        words = [*words, f"data.train={{{source}}}", f"data.eval={{{source}, size: 3}}"]
        found[method] = words, (output / "run", *train(output, 1, *words))
    return found


LAYOUTS = {
    "tp2_pp2": (4, "parallel.tp=2", "parallel.pp=2", "train.max_tokens_per_micro_batch=128"),
    "cp2_dp2": (4, "parallel.cp=2", "train.share_prompts=false"),
}


def check_layout(method, layout, runs, output):
    (ranks, *more), (words, whole) = LAYOUTS[layout], runs[method]
    assert losses(train(output, ranks, *words, *more)[0]) == pytest.approx(losses(whole[1]), rel=2e-5)


def test_a_layout_has_the_losses_of_one_process(runs, tmp_path):
    check_layout("kto", "cp2_dp2", runs, tmp_path)


def test_a_reward_model_has_the_losses_of_one_process(runs, tmp_path):
    check_layout("adapters", "tp2_pp2", runs, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize(
    ("method", "layout"),
    [
        ("sft", "tp2_pp2"),
        ("sft", "cp2_dp2"),
        ("dpo", "tp2_pp2"),
        ("dpo", "cp2_dp2"),
        ("reward", "cp2_dp2"),
        ("reward", "tp2_pp2"),
    ],
)
def test_another_layout_has_them_too(method, layout, runs, tmp_path):
    check_layout(method, layout, runs, tmp_path)


@for_each("method", METHODS)
def test_a_resumed_run_has_the_same_losses(method, runs, tmp_path):
    words, whole = runs[method]
    train(tmp_path, 1, *words, "run.max_steps=2")
    resumed, _ = train(tmp_path, 1, *words, "--resume")
    assert [line["loss"] for line in resumed if "loss" in line] == [line["loss"] for line in whole[1] if "loss" in line]


def response_logprob(model, tokenizer, turns, counted="assistant"):
    """Sum of the log-probs of the messages of the assistant, and their tokens, by transformers."""
    ids, mask = [], []
    for role, text in turns:
        for part, counts in (("<|start|>", False), (f"{role}\n{text}<|end|>", role == counted)):
            own = tokenizer.encode(part)
            ids, mask = ids + own, mask + [counts] * len(own)
    logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    picked = logprobs[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    return float(picked[torch.tensor(mask[1:])].sum()), sum(mask[1:])


def loaded(folder):
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).requires_grad_(False)
    return model, transformers.AutoTokenizer.from_pretrained(folder)


def test_the_loss_is_the_mean_over_the_tokens_of_the_assistant(runs):
    """Against transformers in float64, for the model before the run and the one that the run leaves."""
    folder, lines, _ = runs["sft"][1]
    evaluations = [line["eval/loss"] for line in lines if "eval/loss" in line]
    for model, loss in zip((world.folder() / "model", folder / "model"), evaluations, strict=True):
        sums = [response_logprob(*loaded(model), turns) for turns in TURNS[:3]]
        assert loss == pytest.approx(-sum(total for total, _ in sums) / sum(count for _, count in sums), rel=1e-5)


def test_the_loss_on_pairs_is_that_of_dpo(runs):
    folder, lines, _ = runs["dpo"][1]
    before, after = [line for line in lines if "eval/loss" in line]
    start, end, margins = loaded(world.folder() / "model"), loaded(folder / "model"), []
    for row in PAIRS[:3]:
        both = [[("user", row["prompt"]), ("assistant", row[name])] for name in ("chosen", "rejected")]
        ratios = [response_logprob(*end, turns)[0] - response_logprob(*start, turns)[0] for turns in both]
        margins.append(0.3 * (ratios[0] - ratios[1]))
    wanted = -torch.nn.functional.logsigmoid(torch.tensor(margins, dtype=torch.float64)).mean().item()
    assert before["eval/loss"] == pytest.approx(math.log(2), rel=1e-6)
    assert after["eval/loss"] == pytest.approx(wanted, rel=1e-4)
    assert after["eval/rewards/margin"] == pytest.approx(sum(margins) / 3, rel=1e-3)


def test_the_loss_on_labels_is_that_of_kto(runs):
    folder, lines, _ = runs["kto"][1]
    after = [line for line in lines if "eval/loss" in line][-1]
    start, end, rows = loaded(world.folder() / "model"), loaded(folder / "model"), LABELED[:3]

    def ratio(row, response):
        turns = [("user", row["prompt"]), ("assistant", response["completion"])]
        return response_logprob(*end, turns)[0] - response_logprob(*start, turns)[0]

    kl = max(0, sum(ratio(row, rows[(i + 1) % 3]) for i, row in enumerate(rows)) / 3)
    signs = [1 if row["label"] else -1 for row in rows]
    margins = [sign * 0.3 * (ratio(row, row) - kl) for row, sign in zip(rows, signs, strict=True)]
    assert after["eval/kl"] == pytest.approx(kl, rel=1e-3, abs=1e-6)
    assert after["eval/loss"] == pytest.approx(sum(1 / (1 + math.exp(m)) for m in margins) / 3, rel=1e-4)


def both_texts(row, tokenizer):
    return [
        tokenizer.encode(f"<|start|>user\n{row['prompt']}<|end|><|start|>assistant\n{row[name]}<|end|>")
        for name in ("chosen", "rejected")
    ]


@for_each("method", ("reward", "adapters"))
def test_transformers_loads_a_reward_model_and_gives_its_scores(method, runs):
    import transformers

    from megagrpo.rewards.functions.reward_model import RewardModel

    folder, lines, _ = runs[method][1]
    after = [line for line in lines if "eval/loss" in line][-1]
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder / "model", dtype=torch.float64)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    scores = [[float(model(torch.tensor([ids])).logits) for ids in both_texts(row, tokenizer)] for row in PAIRS[:3]]
    assert after["eval/rewards/chosen"] == pytest.approx(sum(chosen for chosen, _ in scores) / 3, rel=1e-4)
    assert after["eval/rewards/rejected"] == pytest.approx(sum(rejected for _, rejected in scores) / 3, rel=1e-4)
    assert after["eval/rewards/margin"] > 0.1
    used = RewardModel(str(folder / "model"), as_chat=True)
    found = used([row["prompt"] for row in PAIRS[:3]], [row["chosen"] for row in PAIRS[:3]])
    assert found == pytest.approx([chosen for chosen, _ in scores], rel=1e-4)


def test_the_first_gradient_of_a_reward_model_is_that_of_bradley_terry(runs):
    """Of the first four rows, against transformers, with the head that the seed draws."""
    _, lines, _ = runs["reward"][1]
    model, tokenizer = loaded(world.folder() / "model")
    model.requires_grad_(True)
    drawn = torch.randn(model.config.hidden_size, generator=torch.Generator().manual_seed(42))
    head = (drawn * model.config.initializer_range).double().requires_grad_()
    losses = []
    for pair in PAIRS[:4]:
        states = [
            model.model(torch.tensor([ids])).last_hidden_state[0, -1] @ head for ids in both_texts(pair, tokenizer)
        ]
        losses.append(-torch.nn.functional.logsigmoid(states[0] - states[1]))
    loss, trained = torch.stack(losses).mean(), [head, *model.model.parameters()]
    norm = torch.stack([g.norm() for g in torch.autograd.grad(loss, trained)]).norm()
    first = next(line for line in lines if line["step"] == 1)
    assert first["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert first["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)


def test_rows_that_are_too_long_are_dropped_and_counted(runs):
    said = "2 of 8 rows are longer than rollout.max_prompt_length + max_completion_length 60 (longest: 1"
    assert said in runs["sft"][1][2]
