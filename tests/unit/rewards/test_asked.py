"""Rewards computed by external services: a judge and served models behind real HTTP sockets, and a reward model in a
worker."""

import time
from contextlib import ExitStack

import pytest
from ranks import run_ranks

from megagrpo.config import RewardFunction, RewardsSection
from megagrpo.rewards.functions.llm_judge import LlmJudge
from megagrpo.rewards.functions.served import ServedReward
from megagrpo.rewards.scorer import RewardScorer
from megagrpo.types import Prompt, Rollout
from tests.unit.rewards.reward_services import Server, logits, make_model, says, serving


def judge_by_length(body: dict) -> tuple[int, dict]:
    answer = body["messages"][-1]["content"].split("[answer]\n")[1].split("\n[end of answer]")[0]
    return says(f"Score: 1 is too low.\nScore: {len(answer)}")


def scorer(*functions, **section) -> RewardScorer:
    return RewardScorer(RewardsSection(functions=list(functions), workers=1, **section), 100)


def judge(server: Server, **args) -> dict:
    return {"function": "llm_judge", "args": {"url": f"{server.url}/v1", "model": "judge", **args}}


def rollouts(*texts, messages="What is it?", **columns):
    return [Rollout(Prompt(0, (1,), messages, columns), (1,), (0.0,), "stop", 0, t) for t in texts]


def rewards(scored) -> list:
    return [next(iter(s.rewards.values())) for s in scored]


# ------------------------------------------------------------------------------------------------------------ the judge


def test_the_last_score_of_the_judge_is_brought_to_0_to_1():
    with serving(judge_by_length) as server, scorer(judge(server, system="Be fair.", options={"seed": 7})) as s:
        assert rewards(s.score(rollouts("abcde", "abcdefghij", ""))) == [0.5, 1.0, 0.0]
    body = server.asked[0]
    assert body["model"] == "judge" and body["temperature"] == 0 and body["seed"] == 7
    assert (
        body["messages"][0] == {"role": "system", "content": "Be fair."}
        and "What is it?" in body["messages"][1]["content"]
    )


def test_the_task_shows_columns_and_leaves_braces_in_answers_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_KEY", "k-1")
    (tmp_path / "task.txt").write_text("{prompt}|{completion}|{solution}|{low}-{high}")
    with serving(lambda body: says("score = 2")) as server:
        args = {"template": str(tmp_path / "task.txt"), "low": -2, "high": 2, "api_key_env": "MY_KEY"}
        with scorer(judge(server, **args)) as s:
            with pytest.raises(ValueError, match="needs column `solution`"):
                s.check_columns(["answer"])
            batch = rollouts(
                "{prompt} {x}",
                messages=[{"role": "system", "content": "S"}, {"role": "user", "content": "U"}],
                solution="42",
            )
            assert rewards(s.score(batch)) == [1.0]
    assert server.asked[0]["messages"] == [{"role": "user", "content": "system: S\n\nuser: U|{prompt} {x}|42|-2-2"}]
    assert server.headers[0]["Authorization"] == "Bearer k-1"


def test_a_judge_is_asked_again_after_every_kind_of_passing_failure():
    failures = iter([(500, "oops"), (0, ""), (429, "slow down")])

    def answer(body: dict) -> tuple[int, dict | str]:
        return next(failures, None) or judge_by_length(body)

    with serving(answer) as server, scorer(judge(server, retries=3) | {"timeout": 60}) as s:
        assert rewards(s.score(rollouts("abcde"))) == [0.5] and len(server.asked) == 4
        assert s.metrics()["rewards/llm_judge/exceptions"] == 0


FAILING = {
    "broken": (lambda body: (500, "broken"), "responded with status 500: broken (2 attempts)", 2),
    "no_key": (lambda body: (401, "no key"), "responded with status 401: no key", 1),
    "no_json": (lambda body: (200, "no json"), "its response is not JSON", 2),
    "no_score": (
        lambda body: says("I would rather not."),
        "no score in the judge's response: 'I would rather not.'",
        1,
    ),
    "too_high": (lambda body: says("Score: 11"), "the judge's score 11 is not from 0 to 10", 1),
    "no_choices": (lambda body: (200, {"error": "x"}), "no choices in its response", 1),
    "slow": (lambda body: (time.sleep(1.0), says("Score: 1"))[1], "no answer within 0.2 s (2 attempts)", 2),
}


def test_a_judge_that_fails_leaves_the_completion_out_and_is_counted(caplog):
    with ExitStack() as stack:
        servers = {name: stack.enter_context(serving(answer)) for name, (answer, _, _) in FAILING.items()}
        judges = [judge(server, retries=1, timeout=0.2 if name == "slow" else 30.0) for name, server in servers.items()]
        s = stack.enter_context(
            scorer(*(one | {"name": name} for one, name in zip(judges, servers, strict=True)), {"function": "format"})
        )
        scored = s.score(rollouts("abc"))
        assert scored[0].rewards == dict.fromkeys(FAILING) | {"format": 0.0} and scored[0].reward == 0.0
        for name, (_, reason, requests) in FAILING.items():
            assert s.metrics()[f"rewards/{name}/exceptions"] == s.metrics()[f"rewards/{name}/unscorable"] == 1
            assert (
                len(servers[name].asked) == requests
                and f"{servers[name].url}/v1" in caplog.text
                and reason in caplog.text
            )


def test_a_judge_beyond_the_deadline_leaves_the_completion_out():
    with (
        serving(lambda body: (time.sleep(2.0), says("Score: 1"))[1]) as server,
        scorer(judge(server) | {"timeout": 0.3}) as s,
    ):
        assert rewards(s.score(rollouts("abc"))) == [None] and s.metrics()["rewards/llm_judge/timeouts"] == 1


def test_no_more_requests_are_under_way_than_concurrency_allows():
    def slowly(body: dict) -> tuple[int, dict]:
        time.sleep(0.1)
        return judge_by_length(body)

    with serving(slowly) as server, scorer(judge(server), concurrency=3) as s:
        assert rewards(s.score(rollouts(*["abc"] * 9))) == [pytest.approx(0.3)] * 9
        assert server.most == 3


def test_a_cache_answers_in_other_runs_too_and_keeps_no_failures(tmp_path):
    answers = iter([says("no"), says("Score: 5"), says("Score: 9")])
    with serving(lambda body: next(answers)) as server:
        for expected, asked in ((None, 1), (0.5, 2), (0.5, 2)):
            with scorer(judge(server, cache=str(tmp_path / "deep" / "cache.sqlite"))) as s:
                assert rewards(s.score(rollouts("abc"))) == [expected] and len(server.asked) == asked
        # another question
        with scorer(judge(server, cache=str(tmp_path / "deep" / "cache.sqlite"), max_tokens=5)) as s:
            assert rewards(s.score(rollouts("abc"))) == [0.9] and len(server.asked) == 3


@pytest.mark.parametrize(
    "args, reason",
    [
        ({"low": 5, "high": 5}, "low 5 is not below high 5"),
        ({"pattern": "score"}, "needs a group"),
        ({"template": "{prompt}"}, "template lacks {completion}"),
        ({"retries": -1}, "retries -1"),
        ({"tempature": 0}, "did you mean `temperature`"),
    ],
)
def test_a_judge_that_cannot_work_is_refused_before_training(args, reason):
    with pytest.raises(ValueError) as error:
        scorer({"function": "llm_judge", "args": {"url": "http://127.0.0.1:1/v1", "model": "m", **args}})
    assert reason in str(error.value)


# -------------------------------------------------------------------------------------------------------- served models


def test_any_address_may_answer_with_rewards(monkeypatch):
    monkeypatch.setenv("OF_TESTS", "hidden")

    def answer(body: dict) -> tuple[int, dict]:
        return 200, {
            "rewards": [
                None if text == "skip" else len(text) + len(level)
                for text, level in zip(body["completions"], *body["columns"].values(), strict=True)
            ]
        }

    with serving(answer) as server:
        served = {
            "function": f"{server.url}/reward",
            "args": {"columns": ["level"], "batch_size": 2, "headers": {"X-Kind": "1", "X-Key": "$OF_TESTS"}},
        }
        with scorer(served) as s:
            assert s.names == ["reward"]
            with pytest.raises(ValueError, match="needs column `level`"):
                s.check_columns([])
            assert rewards(s.score(rollouts("a", "bb", "skip", level="xx"))) == [3.0, 4.0, None]
            assert rewards(s.score(rollouts("\ud800", messages=[{"role": "user", "content": "Q"}], level=""))) == [1.0]
    assert (
        sorted(len(body["prompts"]) for body in server.asked) == [1, 1, 2]
        and {"X-Kind": "1", "X-Key": "hidden"}.items() <= server.headers[0].items()
    )
    assert server.asked[-1] == {
        "prompts": [[{"role": "user", "content": "Q"}]],
        "completions": ["?"],
        "columns": {"level": [""]},
    }


def test_an_answer_of_another_shape_is_an_error_that_shows_it(caplog):
    answers = {"/0": {"rewards": [1.0, 2.0]}, "/1": {"scores": [1.0]}, "/2": [1.0]}
    with ExitStack() as stack:
        servers = [
            stack.enter_context(serving(lambda body, answer=answer: (200, answer))) for answer in answers.values()
        ]
        s = stack.enter_context(
            scorer(*({"function": server.url + path} for server, path in zip(servers, answers, strict=True)))
        )
        assert list(s.score(rollouts("a"))[0].rewards.values()) == [None] * 3
    for answer in answers.values():
        assert f'wanted {{"rewards": [1 numbers or nulls]}}, got {answer}' in caplog.text


def test_an_address_without_a_server_is_named(caplog):
    with scorer({"function": "http://127.0.0.1:9/r", "args": {"retries": 1}}) as s:
        assert rewards(s.score(rollouts("a"))) == [None] and s.metrics()["rewards/r/exceptions"] == 1
    assert "http://127.0.0.1:9/r: ConnectError" in caplog.text and "(2 attempts)" in caplog.text


@pytest.mark.parametrize(
    "options, reason",
    [({"batch_size": 0}, "batch_size 0"), ({"timeout": 0}, "timeout 0"), ({"retries": -1}, "retries -1")],
)
def test_options_of_a_served_model_are_checked(options, reason):
    with pytest.raises(ValueError, match=reason):
        ServedReward("http://127.0.0.1:9/r", **options)
    with pytest.raises(ValueError, match="takes no columns"):
        ServedReward("http://127.0.0.1:9/classify", columns=["a"])


def test_a_secret_is_sent_from_the_environment_and_not_from_the_config():
    with pytest.raises(ValueError, match=r"args\.headers\.Authorization must not be a literal secret; write \$NAME"):
        ServedReward("http://127.0.0.1:9/r", headers={"Authorization": "Bearer k-1"})
    with pytest.raises(ValueError, match="the environment variable OF_NOBODY is not set; export it"):
        ServedReward("http://127.0.0.1:9/r", headers={"X-Key": "$OF_NOBODY"})


def test_a_servers_reward_that_is_not_finite_fails_its_completion_alone(caplog):
    values = ["0.5", "1e400", "-Infinity", "NaN", "1e300"]
    data = ", ".join(f'{{"index": {i}, "probs": [{value}]}}' for i, value in enumerate(values))
    answer = f'{{"rewards": [{", ".join(values)}], "data": [{data}]}}'
    with (
        serving(lambda body: (200, answer)) as server,
        scorer(*({"function": server.url + path} for path in ("/r", "/classify"))) as s,
    ):
        scored = s.score(rollouts(*"abcde"))
    assert [list(one.rewards.values()) for one in scored] == [[0.5, 0.5], *[[None, None]] * 4]
    assert [str(one.reward) for one in scored] == ["1.0", *["nan"] * 4] and caplog.text.count(
        "it returned inf, which is not finite"
    ) == 2


# --------------------------------------------------------------------------------------------------- models in a worker


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return run_ranks(make_model, 1, tmp_path_factory.mktemp("reward_model") / "tiny-rm")[0]


def logit(folder, *texts: str) -> list:
    return [pytest.approx(value, abs=1e-4) for value in run_ranks(logits, 1, folder, list(texts))[0]]


def test_a_reward_model_gives_the_logit_of_prompt_and_completion(model):
    texts = ["yes", "no, and here is why", "x" * 30]
    with scorer({"function": f"model:{model}", "args": {"batch_size": 2}, "weight": 2.0}, {"function": "format"}) as s:
        assert s.names == ["tiny-rm", "format"]
        plain = s.score(rollouts(*texts, "\ud800"))
        assert rewards(plain) == logit(model, *("What is it?" + t for t in [*texts, "?"]))
        assert plain[0].reward == pytest.approx(2 * plain[0].rewards["tiny-rm"])
        chat = s.score(rollouts(*texts, messages=[{"role": "user", "content": "Q"}]))
        assert rewards(chat) == logit(model, *(f"<user>Q~<assistant>{t}~" for t in texts))


def made_and_called(cases: list[tuple[str, dict]]) -> list:
    """For each path and options: the model's score of one completion, or the text of the error. Run it in a rank."""
    from megagrpo.rewards.functions.reward_model import RewardModel

    found = []
    for path, options in cases:
        try:
            found.append(RewardModel(path, **options)(["What is it?"], ["defgh"])[0])
        except ValueError as error:
            found.append(str(error))
    return found


def test_options_of_a_reward_model(model):
    half = {"dtype": "bfloat16", "threads": 2, "device": "cpu", "tokenizer": str(model)}
    found = run_ranks(
        made_and_called, 1, [(str(model), options) for options in ({"as_chat": True}, {"max_length": 14}, half)]
    )[0]
    chat, short, whole = logit(model, "<user>What is it?~<assistant>defgh~", "What is it?def", "What is it?defgh")
    assert found[:2] == [chat, short] and found[2] == pytest.approx(whole.expected, abs=0.1)


@pytest.mark.full
def test_what_is_no_reward_model_is_refused(model, tmp_path):
    three, causal = (
        run_ranks(make_model, 1, tmp_path / "three", 3)[0],
        run_ranks(make_model, 1, tmp_path / "causal", 1, True)[0],
    )
    cases = [(str(three), {}), (str(causal), {}), (str(model), {"dtype": "int8"}), (str(model), {"batch_size": 0})]
    reasons = [
        "it has 3 labels; a reward model has one",
        "its weights lack score.weight",
        "dtype 'int8' must be",
        "batch_size 0 must be",
    ]
    for text, reason in zip(run_ranks(made_and_called, 1, cases)[0], reasons, strict=True):
        assert reason in text
    with pytest.raises(ValueError, match="`model:/no/such/folder`: no folder"):
        scorer({"function": "model:/no/such/folder"})
    with pytest.raises(ValueError, match=r"args.path: `three` has no such argument"):
        scorer({"function": f"model:{three}", "args": {"path": "other"}})


def test_names_of_models_and_addresses():
    functions = [
        "model:/a/b/my-rm/",
        "model:org/name",
        "http://host:8000/classify",
        "http://host:8000",
        "a.b:f",
        "a.b:f",
    ]
    section = RewardsSection(functions=[RewardFunction(function=f) for f in functions])
    assert section.names == ["my-rm", "name", "classify", "host_8000", "f", "f_2"]
    assert LlmJudge.value_of_failure is None
