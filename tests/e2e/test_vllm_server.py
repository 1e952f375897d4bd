"""Generation by real vLLM servers, compared with transformers; and faults of servers and trainers."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import pytest
import torch

from megagrpo.config import TeacherSection
from megagrpo.data.packing.sample_packing import PackingRules, pack
from megagrpo.data.tokens.tokenizer import Tokenizer
from megagrpo.engine.client import VllmEngine
from megagrpo.engine.http.protocol import EngineDeadError, EngineError, EngineStartError, derive_seed
from megagrpo.engine.served_teacher import ServedTeacher
from megagrpo.engine.server_slots import QUEUE_ROUTE, Queue, read_queue
from megagrpo.engine.servers.launcher import Launcher
from megagrpo.engine.servers.options import ServerOptions
from megagrpo.train_types import TrainSample
from megagrpo.trainer.rollout.collector import numbered
from megagrpo.types import Prompt, SamplingParams, Truncation
from tests.e2e.tiny_servers import (
    PROMPTS,
    below,
    model_folder,
    naive_logits,
    naive_logprobs,
    oracle,
    push,
    tied_llamas,
    tokenizer_of_threes,
)
from tests.naive_truncation import truncated_log_softmax
from tests.rank_fakes import OneRank

GREEDY = SamplingParams(temperature=0.0, max_tokens=16)


@pytest.fixture(scope="module")
def fresh():
    """A server to which the weights of a folder have been pushed."""
    synced, fresh = tied_llamas()
    push(synced.engine, fresh.folder)
    return replace(synced, folder=fresh.folder)


def ids(groups):
    return [[tuple(rollout.response_ids.tolist()) for rollout in group] for group in groups]


def test_greedy_responses_are_those_of_transformers(fresh):
    for (rollout,), prompt in zip(fresh.engine.generate(PROMPTS, 1, GREEDY, seed=0), PROMPTS, strict=True):
        tokens = torch.tensor([prompt.token_ids])
        expected = oracle(fresh.folder).generate(
            tokens, max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert rollout.response_ids.tolist() == expected[0, len(prompt.token_ids) :].tolist()
        assert (
            rollout.prompt is prompt
            and rollout.weight_version == fresh.engine.weight_version
            and rollout.text == " ".join(map(str, rollout.response_ids))
        )


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_of_the_distribution_that_was_sampled(fresh, temperature):
    for group in fresh.engine.generate(PROMPTS, 3, SamplingParams(temperature, 20), seed=5):
        for rollout in group:
            expected = naive_logprobs(fresh.folder, rollout.prompt, rollout.response_ids, temperature)
            torch.testing.assert_close(torch.tensor(rollout.rollout_logprobs), expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    "rules", [dict(top_p=0.7), dict(top_k=5), dict(min_p=0.2), dict(top_p=0.8, top_k=40, min_p=0.05)], ids=str
)
def test_a_truncated_sampler_chooses_and_reports_within_what_it_keeps(fresh, rules):
    sampling = SamplingParams(1.3, 20, truncation=Truncation(**rules))
    for (rollout,) in fresh.engine.generate(PROMPTS, 1, sampling, seed=5):
        logits, labels = (
            naive_logits(fresh.folder, rollout.prompt, rollout.response_ids) / 1.3,
            torch.tensor(rollout.response_ids),
        )
        expected = truncated_log_softmax(logits, labels, sampling.truncation).gather(1, labels[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(rollout.rollout_logprobs).double(), expected, rtol=0, atol=1e-3)
        assert (expected - logits.log_softmax(-1).gather(1, labels[:, None])[:, 0]).mean() > 0.1


def test_one_seed_gives_one_result_and_another_seed_another(fresh):
    sampling = SamplingParams(1.0, 12)
    first = ids(fresh.engine.generate(PROMPTS, 4, sampling, seed=1))
    assert ids(fresh.engine.generate(PROMPTS, 4, sampling, seed=1)) == first
    assert ids(fresh.engine.generate(PROMPTS[::-1], 4, sampling, seed=1)) == first[::-1]
    second = ids(fresh.engine.generate(PROMPTS, 4, sampling, seed=2))
    assert not {response for group in first for response in group} & {
        response for group in second for response in group
    }


def test_the_requests_of_a_group_give_the_tokens_of_one_request_for_all_of_it(fresh):
    """vLLM gives response i of a request with n > 1 the seed `seed + i`."""
    sampling, prompt = SamplingParams(1.0, 12), PROMPTS[1]
    params = {"n": 4, "seed": derive_seed(1, prompt.prompt_id, 0), "temperature": 1.0, "max_tokens": 12, "logprobs": 0}
    body = {"token_ids": prompt.token_ids, "sampling_params": params | {"detokenize": False}}
    choices = httpx.post(f"{fresh.launcher.urls[0]}/inference/v1/generate", json=body, timeout=60).json()["choices"]
    group = fresh.engine.generate([prompt], 4, sampling, seed=1)[0]
    assert ids([group]) == [[tuple(choice["token_ids"]) for choice in choices]]
    assert [rollout.rollout_logprobs.tolist() for rollout in group] == [
        [entry["logprob"] for entry in choice["logprobs"]["content"]] for choice in choices
    ]


def test_the_waiting_queue_of_a_server_is_read_from_its_metrics(fresh):
    queue = read_queue(httpx.get(f"{fresh.launcher.urls[0]}{QUEUE_ROUTE}", timeout=60).text)
    assert queue == Queue(0, 0)


def test_each_group_is_handed_out_as_it_comes(fresh):
    handed = sorted(fresh.engine.groups(PROMPTS, 2, SamplingParams(1.0, 12), 1))
    assert [index for index, _ in handed] == list(range(len(PROMPTS)))
    assert [group for _, group in handed] == fresh.engine.generate(PROMPTS, 2, SamplingParams(1.0, 12), 1)


def test_responses_of_a_group_differ_and_so_do_groups_of_the_same_prompt(fresh):
    one, two = ids(fresh.engine.generate(numbered([PROMPTS[0], PROMPTS[0]]), 8, SamplingParams(1.0, 12), seed=3))
    assert len(set(one + two)) == 16


def test_a_response_ends_with_its_stop_token_or_at_the_limit(fresh):
    (plain,) = fresh.engine.generate(PROMPTS[:1], 1, GREEDY, seed=0)[0]
    stop = int(plain.response_ids[6])
    at = plain.response_ids.tolist().index(stop)
    (stopped,) = fresh.engine.generate(PROMPTS[:1], 1, SamplingParams(0.0, 16, (stop,)), seed=0)[0]
    assert (plain.finish_reason, len(plain.response_ids)) == ("length", 16)
    assert (stopped.finish_reason, stopped.response_ids.tolist()) == ("stop", plain.response_ids[: at + 1].tolist())
    assert len(stopped.rollout_logprobs) == at + 1


@pytest.fixture(scope="module")
def reader(fresh):
    """A client of the fresh server that decodes with the server's tokenizer."""
    return VllmEngine(fresh.launcher.urls, tokenizer_of_threes().decode, any_version=True)


# Where the stop string begins, counted in letters from the first letter of the tenth token's first occurrence, and its
# length.
@pytest.mark.parametrize(
    ("begin", "length"), [(1, 1), (-1, 2), (-4, 6), (2, 1), (0, 3)], ids=["in", "over 2", "over 3", "end", "all"]
)
@pytest.mark.parametrize("include", [True, False], ids=["kept", "cut"])
def test_a_stop_string_ends_the_response_with_the_token_that_completes_it(fresh, reader, begin, length, include):
    """Each token has three letters, so the table of tokens and letters is division by three."""
    (plain,) = reader.generate(PROMPTS[:1], 1, GREEDY, seed=0)[0]
    start = 3 * plain.response_ids.tolist().index(plain.response_ids[9]) + begin
    stop = plain.text[start : start + length]
    start = plain.text.index(stop)  # the first occurrence counts
    count = (start + length - 1) // 3 + 1
    sampling = SamplingParams(0.0, 16, stop=("never", stop), include_stop=include)
    (stopped,) = reader.generate(PROMPTS[:1], 1, sampling, seed=0)[0]
    assert 3 < count < 16 and plain.stop_string is None
    assert (stopped.finish_reason, stopped.stop_string) == ("stop", stop)
    assert stopped.response_ids.tolist() == plain.response_ids[:count].tolist() and stopped.written.sum() == count
    assert stopped.text == plain.text[: start + length if include else start]
    expected = naive_logprobs(fresh.folder, stopped.prompt, stopped.response_ids)
    torch.testing.assert_close(torch.tensor(stopped.rollout_logprobs), expected, rtol=0, atol=1e-3)


def test_a_response_without_its_stop_string_ends_as_usual(reader):
    (rollout,) = reader.generate(PROMPTS[:1], 1, SamplingParams(0.0, 5, stop=("never",)), seed=0)[0]
    assert (rollout.finish_reason, rollout.stop_string, len(rollout.response_ids)) == ("length", "", 5)


def test_a_prompt_that_does_not_fit_is_refused_with_the_servers_reason(fresh):
    with pytest.raises(EngineError, match=r"vLLM server http.*vllm_0.log.* rejected prompt 77: .*128"):
        fresh.engine.generate([Prompt(77, (5,) * 140, "")], 1, GREEDY, seed=0)


def test_a_response_for_which_the_server_has_no_room_is_an_error(fresh):
    with pytest.raises(EngineError, match=r"no room for prompt 77: 120 tokens and a response of 16; .*--max-model-len"):
        fresh.engine.generate([Prompt(77, (5,) * 120, "")], 1, GREEDY, seed=0)


def dead_url():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{s.getsockname()[1]}"


def test_prompts_of_a_dead_server_go_to_the_others(fresh):
    expected = ids(fresh.engine.generate(PROMPTS, 2, SamplingParams(1.0, 8), seed=9))
    both = VllmEngine([dead_url(), *fresh.launcher.urls], str, any_version=True)
    assert ids(both.generate(PROMPTS, 2, SamplingParams(1.0, 8), seed=9)) == expected
    assert both.fleet.serving() == both.urls[1:]


def test_when_no_server_is_left_the_error_names_them_and_their_logs():
    url = dead_url()
    with pytest.raises(EngineDeadError, match=f"{url} .*here.log"):
        VllmEngine([url], str, logs=[Path("here.log")]).generate(PROMPTS, 1, GREEDY, seed=0)


def test_rollouts_of_unexpected_weights_are_refused(fresh):
    other = VllmEngine(fresh.launcher.urls, str)
    other.weight_version = (version := fresh.engine.weight_version) + 3
    with pytest.raises(EngineError, match=rf"weight version \['{version}'\]; the last sync was {version + 3}"):
        other.generate(PROMPTS[:1], 1, GREEDY, seed=0)


@pytest.mark.full
def test_a_server_that_cannot_start_shows_the_end_of_its_log(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no_such_model", "architectures": ["NoSuchModel"]}))
    launcher = Launcher(ServerOptions(str(tmp_path), "float32", 64, kv_cache_gb=1), tmp_path / "logs")
    launcher.start()
    with pytest.raises(EngineStartError, match=r"(?s)ended with exit code 1 .*vllm_0.log.*no_such_model"):
        launcher.wait()
    assert launcher.servers == []


def taught_batch():
    """Six samples of three prompts that share their copies, as a layout of one rank packs them, by their index."""
    draw = random.Random(7)
    samples = []
    for i in range(6):
        prompt, response = [3 + i // 2, *range(5, 9 + i // 2)], [draw.randrange(3, 997) for _ in range(3 + i)]
        mask = torch.tensor([False] * len(prompt) + [True] * len(response))
        rows = torch.tensor([*prompt, *response]), mask, torch.zeros(mask.numel())
        samples.append(TrainSample(*rows, advantage=1.0, index=i))
    return samples, pack(samples, PackingRules(max_tokens=64, share_prompts=True, sequence_align=4))


@dataclass(frozen=True)
class Alone(OneRank):
    """The layout of one rank."""

    is_dp_leader: bool = True
    is_last_stage: bool = True
    ends: None = None


def served(url, name, over=5):
    return ServedTeacher(TeacherSection(path=name, urls=[DEAD, url], over=over), "algorithm.teacher.0", Alone())


DEAD = "http://127.0.0.1:9"


def test_a_served_teacher_says_what_transformers_computes(fresh, monkeypatch, capfd):
    url = fresh.engine.urls[0]
    name, (samples, batch) = httpx.get(f"{url}/v1/models").json()["data"][0]["id"], taught_batch()
    tops, sampled = served(url, name).top_logprobs(batch, 5), served(url, name).logprobs(batch)
    assert f"algorithm.teacher.0.urls: {DEAD} does not respond" in capfd.readouterr().err
    for m, top, row in zip(batch.micro_batches, tops, sampled, strict=True):
        assert m.prefixes is not None and not top.logprobs[~m.loss_mask].any() and not row[~m.loss_mask].any()
        owners = m.samples[m.sequence_index][m.loss_mask]
        for index in owners.unique().tolist():
            sample, tokens = samples[index], m.loss_mask.nonzero()[:, 0][owners == index]
            start = int(sample.response_mask.int().argmax())
            prompt, response = sample.token_ids[:start].tolist(), sample.token_ids[start:].tolist()
            expected = naive_logits(fresh.folder, Prompt(0, tuple(prompt), ""), response).double().log_softmax(-1)
            best = expected.topk(5)
            assert torch.equal(top.token_ids[tokens], best.indices)
            torch.testing.assert_close(top.logprobs[tokens].double(), best.values, rtol=0, atol=1e-3)
            labels = torch.tensor(response)[:, None]
            torch.testing.assert_close(row[tokens].double(), expected.gather(1, labels)[:, 0], rtol=0, atol=1e-3)
    tokenizer = Tokenizer(tokenizer_of_threes())
    alone = replace(served(url, name), section=TeacherSection(path=name, urls=[url], over=5))
    alone.check(tokenizer, 100)
    for changed, longest, problem in (
        (dict(path="other"), 100, f"algorithm.teacher.0.path: {url} serves {name}, not other; name it"),
        (dict(urls=[DEAD]), 100, f"algorithm.teacher.0.urls: {DEAD} does not respond .*; start the server"),
        (dict(over=500), 100, "algorithm.teacher.0.urls: .*logprobs.*; start it with --max-logprobs 500"),
        ({}, 128, "reads 128 tokens, but 129 are needed; raise its --max-model-len"),
    ):
        section = alone.section.model_copy(update=changed)
        with pytest.raises(ValueError, match=problem):
            replace(alone, section=section).check(tokenizer, longest)
    monkeypatch.setattr(tokenizer, "decode", lambda ids, special: "another text")
    with pytest.raises(ValueError, match="its tokens 0 to 999 are not the policy's; serve a teacher with the policy's"):
        alone.check(tokenizer, 100)
    with pytest.raises(EngineError, match=f"algorithm.teacher.0.urls: {url}: .*500.*; restart the server, and resume"):
        alone.top_logprobs(batch, 500)


TRAINER = """
import os, sys, time
from pathlib import Path
from megagrpo.engine.servers.launcher import Launcher
from megagrpo.engine.servers.options import ServerOptions
from megagrpo.engine.server_slots import QUEUE_ROUTE, Queue, read_queue
launcher = Launcher(ServerOptions(sys.argv[1], "float32", 64, kv_cache_gb=1, omp_threads=1), Path(sys.argv[2]))
launcher.start()
launcher.wait()
print(launcher.servers[0].supervisor.pid, *launcher.urls, flush=True)
time.sleep(600)
"""


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.full
def test_no_server_process_outlives_a_trainer_that_is_killed(tmp_path):
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, model_folder("llama"), tmp_path], stdout=subprocess.PIPE, text=True
    )
    try:
        supervisor, url = trainer.stdout.readline().split()
        family = [int(supervisor), *below(int(supervisor))]
        files = {f"/dev/shm/{name}" for name in os.listdir("/dev/shm") if name.startswith("psm_")}
        ours = {file for file in files for pid in family if file in Path(f"/proc/{pid}/maps").read_text()}
        assert len(family) >= 4 and all(map(alive, family)) and ours and httpx.get(f"{url}/health").status_code == 200
    finally:
        trainer.send_signal(signal.SIGKILL)
        trainer.wait()
    deadline = time.monotonic() + 20
    while any(map(alive, family)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert [pid for pid in family if alive(pid)] == []
    assert not [file for file in ours if Path(file).exists()]
