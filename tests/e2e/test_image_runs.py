"""Whole runs on prompts with images, on a real vLLM server. The trainer's log-probs agree with vLLM's in each step."""

import json
import os
import signal

import pytest
from PIL import Image

from megagrpo.records.checkpoints.run_files import checkpoints
from tests.distributed.tiny_vision import image
from tests.e2e import image_world, world
from tests.e2e.test_async_runs import AHEAD, GROUP, GROUPS, STILL, texts

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]


def agrees(run: world.Run) -> bool:
    """Whether trainer and vLLM saw the same images. Without them the error is above 1.01."""
    return all(line["token_mult_prob_error"] < 1.0005 for line in run.metrics)


@pytest.fixture(scope="module")
def synchronous(tmp_path_factory):
    """All responses of a synchronous run of nine steps."""
    run = image_world.train(tmp_path_factory.mktemp("synchronous"), "run.max_steps=9", *STILL)
    assert run.code == 0 and agrees(run), run.err
    return texts(run)


def test_a_killed_run_that_generates_ahead_finds_its_images_again(tmp_path, synchronous):
    more = [*STILL, *AHEAD, "run.save_steps=1", "run.save_total_limit=1"]
    with world.running(tmp_path, *image_world.words("run.max_steps=1000", *more), launched=True) as trainer:
        world.wait_for(lambda: world.steps_done(tmp_path) >= 3, "third step")
        os.kill(trainer.pid, signal.SIGKILL)
        trainer.wait()
    newest = checkpoints(tmp_path / "run" / "checkpoints")[-1]
    assert list(newest.glob("ahead*")), "groups were generated ahead"
    steps = int(newest.name.removeprefix("step_")) + 2
    run = image_world.train(tmp_path, f"run.max_steps={steps}", *more, "run.resume=true")
    assert run.code == 0 and agrees(run), run.err
    assert texts(run) == synchronous[: steps * GROUPS * GROUP]
    assert [line["staleness/max"] for line in run.metrics] == [0.0] + [1.0] * (steps - 1)


def test_a_response_that_a_sync_interrupts_keeps_its_images(tmp_path):
    more = [*AHEAD, *STILL, "rollout.in_flight=resume", "rollout.max_completion_length=64", "rollout.max_num_seqs=1"]
    run = image_world.train(tmp_path, "run.max_steps=3", *more)
    assert run.code == 0 and agrees(run), run.err
    assert any("later_versions" in row for row in run.completions)


LONG = ("multi_turn.max_response_length=72",)
PLAYERS = '''
class Guide:
    """An environment that sees the picture."""

    def reset(self, image, width, **columns):
        assert image.width == width
        return f" of {width}"

    def step(self, messages, turn):
        return [*messages, {"role": "user", "content": "sure?"}], turn >= 3, 0.5


class Spoiler(Guide):
    def reset(self, **columns):
        return " <|image_pad|>"
'''


def test_conversations_keep_the_images_of_the_prompt_and_the_audit_recomputes_them(tmp_path):
    (tmp_path / "players.py").write_text(PLAYERS)
    more = [
        f"multi_turn.environment={tmp_path}/players.py:Guide",
        *LONG,
        "rollout.num_generations=2",
        "debug.dump_steps=[1,2]",
        f"rollout.allowed_token_ids={[*range(67)]}",  # the audit refuses a sampled image token
        "algorithm.beta=0.1",
        "train.share_prompts=true",
    ]
    run = image_world.train(tmp_path, "run.max_steps=2", *more)
    assert run.code == 0 and agrees(run), run.err
    assert max(len(row["dialogue"]["turns"]) for row in run.completions) == 3
    assert any(" of 84" in str(row["prompt"]) for row in run.completions)
    images = list((run.folder / "dumps" / "step_000001" / "images").iterdir())
    assert len(images) == GROUPS, "each image is written once"
    for step in (1, 2):
        code, said = world.audit(run.folder, "--step", step)
        assert code == 0, said
    for path in images:
        image(*Image.open(path).size, seed=99).save(path, "PNG")
    code, said = world.audit(run.folder, "--step", 1)
    assert code == 1 and "policy log-probs" in said, said


def test_a_text_of_reset_must_not_hold_the_image_token(tmp_path):
    (tmp_path / "players.py").write_text(PLAYERS)
    run = image_world.train(
        tmp_path,
        f"multi_turn.environment={tmp_path}/players.py:Spoiler",
        *LONG,
        "run.max_steps=1",
        "multi_turn.retries=0",
    )
    assert "text of the prompt must not hold the image token" in run.out + run.err


SOURCE = '''
import base64
import io

from PIL import Image


class Mixed:
    """Every second row is new, with its image in one of the forms that a row may have."""

    def __init__(self, rows, seed):
        self.rows, self.count = rows, 0

    def next(self, count, progress):
        return [self.one() for _ in range(count)]

    def one(self):
        self.count += 1
        if self.count % 2:
            return self.count % len(self.rows)
        picture = Image.new("RGB", (28, 56), (self.count * 9 % 256, 80, 200))
        out = io.BytesIO()
        picture.save(out, "PNG")
        text = base64.b64encode(out.getvalue()).decode()
        forms = [picture, dict(bytes=out.getvalue()), dict(bytes=text), "data:image/png;base64," + text]
        return dict(prompt="what is new?", image=forms[self.count // 2 % 4], width=28)

    def state_dict(self):
        return dict(count=self.count)

    def load_state_dict(self, state):
        self.count = state["count"]
'''


def test_a_source_sends_new_rows_with_images(tmp_path):
    (tmp_path / "mine.py").write_text(SOURCE)
    more = [f"data.source={tmp_path}/mine.py:Mixed", "rollout.prompts_per_step=8", *AHEAD, *STILL]
    more += ["rollout.num_generations=2", "algorithm.beta=0"]
    run = image_world.train(tmp_path, "run.max_steps=2", *more)
    assert run.code == 0 and agrees(run), run.err
    assert sum(row["prompt_id"] >= image_world.ROWS for row in run.completions) == 2 * 8
    run = image_world.train(tmp_path, "run.max_steps=3", *more, "run.resume=true")
    assert run.code == 0 and agrees(run) and len(run.metrics) == 3, run.err


def test_an_image_token_that_the_policy_wrote_is_text_in_later_turns_too(tmp_path):
    (tmp_path / "players.py").write_text(PLAYERS)
    more = [
        f"multi_turn.environment={tmp_path}/players.py:Guide",
        *LONG,
        "rollout.allowed_token_ids=[0,1,2,66,69]",
        "rollout.prompts_per_step=8",
        "rollout.num_generations=2",
    ]
    run = image_world.train(tmp_path, "run.max_steps=1", *more)
    assert run.code == 0 and agrees(run), run.err
    assert max(len(row["dialogue"]["turns"]) for row in run.completions) == 3
    assert run.metrics[0]["completions/mean_length"] > 5


def test_a_task_with_images_beside_one_of_text_learns_and_its_audit_agrees(tmp_path):
    rewards = f"{image_world.folder()}/rewards.py"
    (tmp_path / "text.jsonl").write_text("".join(f'{{"prompt": "say {i}", "images": "a word"}}\n' for i in range(5)))
    (tmp_path / "mine.py").write_text(
        "def short(completions, **columns):\n    return [-len(str(c)) / 9 for c in completions]\n"
    )
    tasks = [
        {"name": "pictures", "weight": 2, "rewards": {"functions": [{"function": f"{rewards}:early"}]}},
        {
            "name": "text",
            "data": {"train": {"source": f"{tmp_path}/text.jsonl"}, "images": False},
            "rewards": {"functions": [{"function": f"{tmp_path}/mine.py:short"}]},
            "rollout": {"num_generations": 2},
        },
    ]
    more = [f"tasks={json.dumps(tasks)}", "debug.dump_steps=[2]", f"rollout.allowed_token_ids={[*range(67)]}"]
    run = image_world.train(tmp_path, "run.max_steps=2", "rollout.prompts_per_step=3", *more)
    assert run.code == 0 and agrees(run), run.err
    assert [(line["tasks/pictures/groups"], line["tasks/text/groups"]) for line in run.metrics] == [(2, 1)] * 2
    code, out = world.audit(run.folder, "--step", 2)
    assert code == 0, out
