"""With two real servers, or two data-parallel copies in one, the turns of conversations find their prefixes, by vLLM's
own counters."""

import asyncio
import re

import httpx
import pytest

from megagrpo.types import Prompt, SamplingParams
from tests.e2e.tiny_servers import connect, launch, model_folder

SAMPLING = SamplingParams(1.0, 24)
BLOCK = 32  # tokens of a block of the prefix cache


def started(kind, name, num_servers, copies=1, **options):
    options |= dict(max_model_len=256, extra_args=("--block-size", str(BLOCK)), dp=copies)
    folder = model_folder(kind)
    return connect(launch(folder, name, num_servers=num_servers, **options), folder, copies=copies)


@pytest.fixture(scope="module")
def two_servers():
    running = started("llama", "homes", 2)
    yield running
    running.launcher.stop()


@pytest.fixture(scope="module")
def two_copies():
    running = started("qwen3_moe", "copies", 1, 2, expert_parallel=True)
    yield running
    running.launcher.stop()


def hits(running):
    """Tokens that each server, or each copy of one, has found in its prefix cache."""
    headers = {"Authorization": f"Bearer {running.launcher.token}"}
    pages = [httpx.get(f"{url}/metrics", headers=headers).text for url in running.engine.urls]
    name = "prefix_cache_hits_total"
    return [float(found) for page in pages for found in re.findall(rf"^vllm:{name}.* ([0-9.e+]+)$", page, re.MULTILINE)]


@pytest.mark.full
@pytest.mark.parametrize(("servers", "slots"), [("two_servers", 12), ("two_servers", 4), ("two_copies", 24)])
def test_nine_of_ten_tokens_of_prefixes_are_found(request, servers, slots):
    running = request.getfixturevalue(servers)
    # no two prompts share a block
    prompts = [Prompt(i, tuple(5 + (31 * i + 100 * slots + 7 * k) % 900 for k in range(40)), "") for i in range(24)]
    known = []  # tokens before each later turn that a server has read, in whole blocks

    async def respond(session, home, index, _):
        tokens, read = prompts[index].token_ids, 0
        for turn in range(2 + index % 4):
            known.append(read // BLOCK * BLOCK)
            rollout = await session.turn(Prompt(index, tokens, ""), SAMPLING, 100 * index + turn, home)
            read = len(tokens) + len(rollout.response_ids) - 1
            tokens += (*rollout.response_ids.tolist(), 7, 8, 9)
            await asyncio.sleep(0.01 * (index % 5 + turn))
        return tokens

    running.engine.max_num_seqs, before = slots, hits(running)
    groups = list(running.engine.converse(prompts, 1, respond))
    found = [after - earlier for after, earlier in zip(hits(running), before, strict=True)]
    assert len(found) == 2 and all(found) and len(groups) == len(prompts)
    share = sum(found) / sum(known)
    print(f"{slots} slots: {share:.3f} of the tokens of prefixes were found")
    assert 0.9 < share <= 1
