"""A reward model behind vLLM's pooling endpoints gives the logits of transformers."""

import asyncio

import pytest
from ranks import run_ranks

from megagrpo.engine.servers.launcher import Launcher
from megagrpo.engine.servers.options import ServerOptions
from megagrpo.rewards.functions.served import ServedReward
from tests.unit.rewards.reward_services import logits, make_model

pytestmark = pytest.mark.full  # starts its own vLLM server

PLAIN = ("--runner", "pooling", "--no-skip-tokenizer-init")
CHAT = [{"role": "user", "content": "Q"}]
ANSWERS = ["yes", "no, and here is why", "x" * 30]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The end token is the padding token, and no text ends in it: so transformers and vLLM read the same token."""
    folder = run_ranks(make_model, 1, tmp_path_factory.mktemp("served") / "tiny-rm")[0]
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ '.' if loop.last else eos_token }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.fixture(scope="module")
def url(model, tmp_path_factory):
    options = ServerOptions(str(model), "float32", 128, max_num_seqs=8, kv_cache_gb=1, omp_threads=1, extra_args=PLAIN)
    with Launcher(options, tmp_path_factory.mktemp("logs")) as launcher:
        launcher.start()
        launcher.wait()
        yield launcher.urls[0]


@pytest.mark.parametrize("route", ["classify", "pooling"])
def test_vllm_gives_the_logits_of_transformers(model, url, route):
    async def ask(prompts: list, completions: list) -> list[float]:
        return await ServedReward(f"{url}/{route}")(prompts, completions)

    texts = asyncio.run(ask(["Q: "] * 3, ANSWERS))
    assert texts == pytest.approx(run_ranks(logits, 1, model, ["Q: " + a for a in ANSWERS])[0], abs=1e-3)
    chats = asyncio.run(ask([CHAT] * 3, [[{"role": "assistant", "content": a}] for a in ANSWERS]))
    assert chats == pytest.approx(
        run_ranks(logits, 1, model, [f"<user>Q~<assistant>{a}." for a in ANSWERS])[0], abs=1e-3
    )
