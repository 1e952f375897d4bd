"""Rows that a run cannot use are refused, or skipped and counted (`data.bad_rows`)."""

import json
import math
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace

import pytest
import torch

from megagrpo.config import RewardsSection, Task, load_config
from megagrpo.data.examples import DEMONSTRATIONS, LABELED, PREFERENCES, SCORED_PAIRS, ExampleSource
from megagrpo.data.images.prompt_images import ImageReader
from megagrpo.data.prompts import PromptSource, prompt_reader
from megagrpo.data.sources.bad_rows import BadRows
from megagrpo.data.sources.task_mixture import Mixture
from megagrpo.data.tokens.row_settings import RowReader
from megagrpo.data.tokens.tokenizer import load_tokenizer
from megagrpo.rewards.scorer import RewardScorer
from megagrpo.train_types import TrainState
from megagrpo.trainer.evaluation.sets import HeldOut, decodable_sets
from megagrpo.trainer.rollout.collector import NoRollouts, StopRequested
from megagrpo.trainer.rollout.groups import Rollouts
from megagrpo.trainer.run_inputs import check_rows
from tests.distributed.tiny_vision import CHARACTERS, SPECIAL, image, write_model
from tests.rank_fakes import OneRank
from tests.unit.data.test_tokenizer import chat_folder  # noqa: F401
from tests.unit.for_each import for_each

GOOD = dict(prompt="which?", image="one.png", own=None)


@pytest.fixture(scope="module")
def folder():
    with tempfile.TemporaryDirectory() as name:
        write_model(Path(name))
        yield Path(name)


def source(folder: Path, path: Path, *overrides: str) -> PromptSource:
    settings = [f"data.train.source={path}", "data.images=true", "data.shuffle=false", "data.sampling_column=own"]
    config = load_config("megagrpo:quickstart", [*settings, *overrides])
    tokenizer = load_tokenizer(folder)
    tokenizer.images = ImageReader(folder, len(CHARACTERS) + SPECIAL.index("<|image_pad|>"), 2)
    return PromptSource(config.data.train, config.data, tokenizer, 60, 0, row_reader=RowReader(config, tokenizer))


ROWS = {  # a bad row, and what is wrong with it
    "no file": (dict(GOOD, image="lost.png"), "row 1: the prompt has an image that is neither a file nor base64"),
    "outside": (dict(GOOD, image="/etc/hosts"), "row 1: the prompt has an image that is outside of the data's folder"),
    "no image": (dict(GOOD, image="rows.jsonl"), "row 1: the prompt has an image that is in none of the formats"),
    "cut off": (dict(GOOD, image="cut.png"), "row 1: the prompt has an image that cannot be decoded: OSError"),
    "odd image": (dict(GOOD, image=7), "row 1: the prompt has an image that is 7"),
    "tags": (dict(GOOD, prompt="<image><image>"), "row 1: column `prompt` has 2 <image> in its text, and 1 image"),
    "no prompt": (dict(GOOD, prompt=None), "row 1: column `prompt` must be a string or chat messages"),
    "lost column": (dict(image="one.png"), "row 1: column `prompt` must be a string or chat messages"),
    "wrong type": (dict(GOOD, prompt=3.5), "row 1: column `prompt` must be a string or chat messages"),
    "empty messages": (dict(GOOD, prompt=[]), "row 1: column `prompt` must be a string or chat messages"),
    "odd part": (dict(GOOD, prompt=[dict(role="user", content=[dict(type="video")])]), "row 1: column `prompt` must"),
    "sampling": (dict(GOOD, own=dict(temperature=-1)), "row 1: column `own` (data.sampling_column): temperature"),
    "constraint": (dict(GOOD, own=dict(structured_outputs=dict(regex="("))), "row 1: column `own` (data.sampling_"),
    "template": (dict(GOOD, chat_template_kwargs=dict(odd=1)), "row 1: column `chat_template_kwargs`"),
    "too long": (dict(GOOD, prompt="a" * 99), "1 of 3 prompts are longer than rollout.max_prompt_length 60"),
}
LINES = {
    "no JSON": ('{"prompt": ', "line 2, column 11 is not valid JSON"),
    "a list": ("[1]", "line 2 must be an object of columns"),
    "a key twice": ('{"prompt": "a", "prompt": "b"}', "line 2 cannot be read: `prompt` occurs twice"),
    "no UTF-8": (b'{"prompt": "\xff"}', "is not UTF-8 text"),
}


def lines_with(bad) -> bytes:
    text = bad if isinstance(bad, bytes) else (bad if isinstance(bad, str) else json.dumps(bad)).encode()
    good = json.dumps(GOOD).encode()
    return b"\n".join([good, text, good])


@for_each("kind", [*ROWS, *LINES])
def test_bad_rows_of_every_kind_are_skipped_and_counted(folder, tmp_path, kind):
    bad, said = (ROWS | LINES)[kind]
    image(56, 56, 1).save(tmp_path / "one.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "one.png").read_bytes()[:-60])
    path = tmp_path / "rows.jsonl"
    path.write_bytes(lines_with(bad))
    long = "data.overlong_prompts=error"
    with pytest.raises(ValueError) as error:
        source(folder, path, long)
    assert said in str(error.value)
    prompts = source(folder, path, long, "data.bad_rows=skip")
    assert len(prompts) == 2 == len(prompts.all()) and prompts.bad.count == 1
    assert [line for line in prompts.warnings if "1 of 3 rows are bad and skipped" in line and said in line]
    assert "image" in prompts.columns
    path.write_bytes(lines_with(bad).split(b"\n")[1] + b"\n")
    with pytest.raises(ValueError, match=r"no row is usable|are bad|no column"):
        source(folder, path, long, "data.bad_rows=skip")


NEEDS = {"accuracy": (("solution", "answer"),), "code": (("tests",),), "mine": (("image",), ("unit",))}


@for_each(
    ("needs", "bad"),
    [
        (["accuracy"], [1, 2, 3]),  # null, an absent key, and a row of another task
        (["accuracy", "code"], [1, 2]),  # a mix of tasks
        (["mine"], []),  # text has no images, and no row has a unit
        ([], []),
    ],
)
def test_a_row_without_a_value_that_every_reward_needs_is_bad(folder, tmp_path, needs, bad):
    rows = [dict(prompt=f"{row}", answer="1") for row in range(5)]
    rows[1]["answer"], rows[2], rows[3] = None, dict(prompt="2"), dict(prompt="3", tests="assert f() == 1")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = reader_of(folder, tmp_path / "rows.jsonl", {name: NEEDS[name] for name in needs})
    prompts = source("skip")
    assert [*prompts.rows] == [row for row in range(5) if row not in bad] and prompts.bad.count == len(bad)
    assert prompts.accepts(rows[0], 5) and prompts.accepts(dict(prompt="new"), 6) == (not bad)
    if bad:
        said = r"^data.train: row 1: has no value in column `answer`, which reward `accuracy` needs; fill it, or remove"
        with pytest.raises(ValueError, match=said.replace("`answer`", "`(solution` or `)?answer`")):
            source("refuse")


def reader_of(folder: Path, path: Path, needs: dict):
    """A function from `data.bad_rows` to the data set, for rewards with these needs."""

    def read(bad_rows: str) -> PromptSource:
        config = load_config("megagrpo:quickstart", [f"data.train.source={path}", f"data.bad_rows={bad_rows}"])
        return prompt_reader(config, load_tokenizer(folder), needs=needs)(config.data.train, config.data, "data.train")

    return read


def test_the_first_row_of_a_column_of_images_may_be_damaged(folder, tmp_path):
    """datasets 6470: `datasets` decodes an image when a row is read."""
    import datasets

    image(56, 56, 1).save(tmp_path / "one.png")
    content = (tmp_path / "one.png").read_bytes()
    rows = [dict(prompt="a", image=dict(bytes=file, path=None), own=None) for file in (content[:900], content)]
    data = datasets.Dataset.from_list(rows).cast_column("image", datasets.Image())
    data.to_parquet(str(tmp_path / "rows.parquet"))
    assert [*source(folder, tmp_path / "rows.parquet", "data.bad_rows=skip").rows] == [1]


def test_needs_are_those_of_rewards_that_read_the_row(tmp_path):
    (tmp_path / "mine.py").write_text("def f(completions, answer, hint=None, **columns):\n    return [0.0]\n")
    mine = dict(function=f"{tmp_path}/mine.py:f")
    judge = dict(function="rubric", args=dict(url="http://localhost:1", model="m", criteria=["is kind"]))
    for functions, expected in (
        ([mine, dict(function="format"), dict(function="accuracy", weight=0.0)], {"f": (("answer",),)}),
        ([dict(function="accuracy"), dict(function="format")], {"accuracy": (("solution", "answer"),)}),
        ([dict(function="accuracy"), judge], {}),  # the judge scores every row
    ):
        with RewardScorer(RewardsSection(functions=functions, workers=1), 8) as scorer:
            assert {name: (*map(tuple, needs),) for name, needs in scorer.needs().items()} == expected


CELLS = {
    "rows.csv": (b'prompt,own\na,\nb,c,d\n"x"y,\n\xff,\ne,\n', 3),
    "rows.tsv": (b"prompt\town\na\t\nb\n\ne\t\n", 1),
    "rows.json": (b'[{"prompt": "a"}, 3, {"prompt": "b", "n": 1e999}, {"n": 1, "n": 2}, {"prompt": "e"}]', 3),
    "more.json": (b'{"prompt": "a"}\n"b"\n{"prompt": "e"}', 1),
}


@for_each("name", CELLS)
def test_lines_of_other_formats_are_skipped_and_counted(folder, tmp_path, name):
    content, count = CELLS[name]
    (tmp_path / name).write_bytes(content)
    overrides = ["data.sampling_column=null", "data.images=false"]
    with pytest.raises(ValueError, match=r"data.train.source: "):
        source(folder, tmp_path / name, *overrides)
    prompts = source(folder, tmp_path / name, *overrides, "data.bad_rows=skip")
    assert [prompt.messages for prompt in prompts.all()] == ["a", "e"] and prompts.bad.count == count


@for_each("content", [b'prompt\na\n"b\nc\n', b'[{"prompt": "a"}, {"prompt": ]'])
def test_a_file_whose_next_row_cannot_be_found_is_refused(folder, tmp_path, content):
    path = tmp_path / ("rows.csv" if content.startswith(b"p") else "rows.json")
    path.write_bytes(content)
    with pytest.raises(ValueError, match="is not valid"):
        source(folder, path, "data.bad_rows=skip", "data.sampling_column=null")


def test_a_new_row_that_is_bad_is_left_out(folder, tmp_path, capsys):
    image(56, 56, 1).save(tmp_path / "one.png")
    (tmp_path / "rows.jsonl").write_bytes(lines_with(GOOD))
    prompts = source(folder, tmp_path / "rows.jsonl", "data.bad_rows=skip")
    assert prompts.accepts(GOOD, 3) and not prompts.accepts(dict(GOOD, image="lost.png"), 3)
    assert prompts.bad.count == 1 and "bad row 1 of data.train is skipped" in capsys.readouterr().err
    with pytest.raises(ValueError, match="row 3"):
        source(folder, tmp_path / "rows.jsonl").accepts(dict(GOOD, image="lost.png"), 3)


class Threads(Barrier):
    """The messages of two ranks, each in a thread."""

    def messages(self, rank: int) -> SimpleNamespace:
        return SimpleNamespace(
            **dict(world_rank=rank, world_size=2, all_reduce=lambda values, _: self.all(rank, values).amax(0)),
            broadcast_object=lambda value, source: self.all(rank, value)[source],
        )

    def all(self, rank: int, value):
        self.values = getattr(self, "values", {}) | {}
        self.wait()
        self.values[rank] = value
        self.wait()
        both = [self.values[0], self.values[1]]
        self.wait()
        return torch.stack(both) if torch.is_tensor(value) else both


def damaged(folder: Path, *bad: int, count: int = 12) -> Path:
    """Rows with images, of which some lack half of their pixels, between a sound header and a sound end."""
    for row in range(count):
        image(56, 56, row).save(folder / f"{row}.png")
        content = (folder / f"{row}.png").read_bytes()
        if row in bad:
            (folder / f"{row}.png").write_bytes(content[: len(content) // 2] + content[-30:])
    lines = [json.dumps(dict(GOOD, image=f"{row}.png")) + "\n" for row in range(count)]
    (folder / "rows.jsonl").write_text("".join(lines))
    return folder / "rows.jsonl"


class Drawn(SimpleNamespace):
    """A collector that keeps what is drawn."""

    pool = "ahead"

    def ask(self, prompts, *_):
        self.asked.update(prompt.prompt_id for prompt in prompts)

    def collect(self, prompts, *_):
        self.rows.append([prompt.prompt_id for prompt in prompts])
        raise StopRequested(0)


def rollouts(prompts: PromptSource, path: Path, layout=None, staleness: int = 0) -> Rollouts:
    settings = [f"data.train.source={path}", "data.images=true", "rollout.prompts_per_step=4"]
    ahead = ["rollout.placement=dedicated", "algorithm.importance_correction=token_truncate"]
    settings += [f"rollout.max_staleness={staleness}", *ahead * bool(staleness)]
    collector, config = (
        Drawn(layout=layout or OneRank(), rows=[], asked=set()),
        load_config("megagrpo:quickstart", settings),
    )
    return Rollouts(config, prompts, collector, None, TrainState(), [].append)


def steps(of: Rollouts, count: int = 3) -> list[list[int]]:
    for _ in range(count):
        with suppress(StopRequested):
            of.draw()
    return of.collector.rows


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_row_with_damaged_pixels_is_replaced_when_it_is_drawn(folder, tmp_path, staleness):
    path = damaged(tmp_path, 1, 2, 7)
    prompts = source(folder, path, "data.bad_rows=skip")
    assert len(prompts) == 12 and prompts.bad.count == 0, "the start reads headers only"
    of = rollouts(prompts, path, None, staleness)
    expected = [[0, 3, 4, 5], [6, 8, 9, 10], [11, 0, 3, 4]]
    assert steps(of) == expected and prompts.bad.count == 3 and len(prompts) == 12
    assert of.collector.asked == (set(range(12)) - {1, 2, 7} if staleness else set())
    said = of.say.__self__
    assert said[0].startswith("warning: ") and "row 1: the prompt has an image that cannot be" in said[0]
    resumed = source(folder, path, "data.bad_rows=skip")
    with suppress(StopRequested):
        (first := rollouts(source(folder, path, "data.bad_rows=skip"), path)).draw()
    first.prompts.store(state := TrainState())
    resumed.restore(state)
    assert steps(rollouts(resumed, path, None, staleness), 2) == expected[1:]


def test_ranks_share_the_decoding_and_leave_out_the_same_rows(folder, tmp_path):
    path, barrier = damaged(tmp_path, 1, 2, 7), Threads(2)
    ranks = [rollouts(source(folder, path, "data.bad_rows=skip"), path, barrier.messages(rank)) for rank in (0, 1)]
    with ThreadPoolExecutor(2) as threads:
        assert [*threads.map(steps, ranks)] == [[[0, 3, 4, 5], [6, 8, 9, 10], [11, 0, 3, 4]]] * 2
    assert ranks[0].say.__self__ == ranks[1].say.__self__ and [of.prompts.bad.count for of in ranks] == [3, 3]


def test_a_task_of_a_mixture_leaves_out_its_own_damaged_rows(folder, tmp_path):
    path = damaged(tmp_path, 1)
    orders = [source(folder, path, "data.bad_rows=skip") for _ in range(2)]
    config = load_config("megagrpo:quickstart", ["data.bad_rows=skip", "data.images=true"])
    mixture = Mixture([Task(name, 1.0, config, {}) for name in "ab"], orders, 0)
    of = rollouts(mixture, path)
    assert steps(of, 1) == [[0, 12, 2, 14]] and [order.bad.count for order in orders] == [1, 1]
    assert "2 more rows are bad" in of.say.__self__[0] and "tasks.a.data.train: row 1: " in of.say.__self__[0]


def test_damaged_pixels_that_are_refused_end_the_run_with_row_file_and_fix(folder, tmp_path):
    path = damaged(tmp_path, 2)
    of = rollouts(source(folder, path), path)
    said = rf"^data.train: row 2: .* cannot be decoded: .*{tmp_path}/2.png.; save it again, remove the row, or set"
    with pytest.raises(NoRollouts, match=said):
        of.draw()
    image(56, 84, 3).save(tmp_path / "2.png")  # another size
    with pytest.raises(NoRollouts, match=r"row 2: .* whose size has changed since the start .*2.png"):
        of.draw()
    image(56, 56, 3).save(tmp_path / "2.png")
    assert steps(of, 1) == [[0, 1, 2, 3]]
    (tmp_path / "all").mkdir()
    path = damaged(tmp_path / "all", *range(12))
    with pytest.raises(NoRollouts, match="no row is usable"):
        rollouts(source(folder, path, "data.bad_rows=skip"), path).draw()


def test_held_out_rows_and_those_of_a_data_source_are_decoded_too(folder, tmp_path):
    path = damaged(tmp_path, 1)
    prompts, said = source(folder, path, "data.bad_rows=skip"), []
    held_out = HeldOut("", "data.eval", prompts.all(), [], 1, None, "", 1.0, None, bad=prompts.bad)
    (found,) = decodable_sets([held_out], OneRank(), said.append)
    assert [prompt.prompt_id for prompt in found.prompts] == [0, *range(2, 12)] and "data.eval: row 1" in said[0]
    with pytest.raises(NoRollouts, match=r"^data.eval: row 1: "):
        decodable_sets([replace(held_out, bad=BadRows())], None, said.append)
    assert prompts.accepts(prompts.row(0), 0) and not prompts.accepts(prompts.row(1), 1)


def test_ranks_that_find_other_rows_bad_end_the_run():
    check_rows("data.train", range(3), [0, 1, 2])
    check_rows("data.train", [0, 2], range(3))  # rank 0 alone has tried the constraint of row 1
    with pytest.raises(ValueError, match=r"data.train: row 1 is bad on some ranks only"):
        check_rows("data.train", range(3), [0, 2])


ASKED = {"role": "user", "content": "2 + 2?"}
TOLD = dict(role="assistant", content="4")
CALL = dict(TOLD, tool_calls=[dict(id="1", type="function", function=dict(name="add", arguments={}))])
BAD_EXAMPLES = {  # columns, a bad row, and what is wrong with it
    "no turn": (dict(messages=[ASKED]), "has no message of the assistant to learn from"),
    "empty": (dict(prompt="2 + 2?", response=" "), "column `response` is an empty response"),
    "lost": (dict(prompt="2 + 2?", response=None), "column `response` is an empty response"),
    "text": (dict(messages="2 + 2?"), "column `messages` must be chat messages"),
    "tools": (dict(messages=[ASKED, dict(ASKED, role="assistant")], tools="{"), "column `tools` is no JSON"),
    "lost prompt": (dict(prompt=None, response="4"), "column `prompt` must be a string or chat messages"),
    "number": (dict(prompt="2 + 2?", response=4), "column `response` must be a string or chat messages"),
    "empty turn": (dict(messages=[ASKED, TOLD, ASKED, dict(TOLD, content=" ")]), "message 3 of the assistant is empty"),
    "first turn": (dict(messages=[TOLD, ASKED, TOLD]), "begins with a message of the assistant"),
    "tool first": (dict(messages=[ASKED, dict(role="tool", content="4"), TOLD]), "message 1 is a tool's, but follows"),
    "call": (dict(messages=[ASKED, CALL, dict(role="tool", content="4", tool_call_id="2"), TOLD]), "the call '2'"),
    "hidden": (dict(messages=[ASKED, CALL]), "calls the tool add, which the template does not show"),
}


def examples(folder, path, rows, layout=DEMONSTRATIONS, limit=60, **data):
    path.write_text("\n".join(map(json.dumps, rows)))
    config = load_config("megagrpo:quickstart", [f"data.train.source={path}"])
    section = config.data.model_copy(update={"bad_rows": "skip", "shuffle": False} | data)
    return ExampleSource(config.data.train, section, "data.train", layout, load_tokenizer(folder), limit, 0)


@for_each("kind", BAD_EXAMPLES)
def test_a_row_without_a_response_is_skipped_or_refused(kind, chat_folder, tmp_path):  # noqa: F811
    bad, said = BAD_EXAMPLES[kind]
    good = (
        dict(messages=[ASKED, {"role": "assistant", "content": "4"}])
        if "messages" in bad
        else dict(bad, prompt="p", response="4")
    )
    found = examples(chat_folder, tmp_path / "rows.jsonl", [good, bad])
    assert found.rows == [0] and said in found.warnings[0] and "row 1" in found.warnings[0]
    with pytest.raises(ValueError, match=r"data\.train: row 1: "):
        examples(chat_folder, tmp_path / "rows.jsonl", [good, bad], bad_rows="refuse")


def test_rows_without_the_columns_of_the_method_are_refused(chat_folder, tmp_path):  # noqa: F811
    with pytest.raises(
        ValueError, match=r"need `messages` or `prompt` \+ `response` or .* but have prompt, respons; did"
    ):
        examples(chat_folder, tmp_path / "rows.jsonl", [dict(prompt="p", respons="r")])
    renamed = examples(chat_folder, tmp_path / "rows.jsonl", [dict(prompt="p", said="r")], columns={"response": "said"})
    assert renamed.all()[0].answers[0].text == "r"


def test_an_overlong_row_is_dropped_or_loses_its_first_tokens(chat_folder, tmp_path):  # noqa: F811
    rows, file = [dict(prompt="p", response="4"), dict(prompt="long " * 30, response="5")], tmp_path / "rows.jsonl"
    assert examples(chat_folder, file, rows).rows == [0]
    kept = examples(chat_folder, file, rows, overlong_prompts="truncate_left").all()[1]
    whole = examples(chat_folder, file, rows, limit=400).all()[1]
    assert whole.token_ids[-len(kept.token_ids) :] == kept.token_ids and kept.answers == whole.answers
    assert len(kept.token_ids) + len(kept.answers[0].token_ids) <= 60


ASKED_AND_TOLD = [ASKED, {"role": "assistant", "content": "4"}]


@for_each(
    ("row", "said"),
    [
        (dict(prompt="p", chosen="4", rejected="4"), "`chosen` and `rejected` are equal"),
        (dict(prompt="p", chosen="4", rejected=[TOLD]), "`chosen` and `rejected` are equal"),
        (dict(prompt="p", chosen="4", rejected=""), "column `rejected` is an empty response"),
        (dict(prompt="p", chosen="4"), "column `rejected` is an empty response"),
        (dict(prompt=None, chosen="4", rejected="5"), "column `prompt` must be a string or chat messages"),
        (dict(prompt=None, chosen=[ASKED], rejected=[ASKED, ASKED]), "has no message of the assistant to learn from"),
    ],
)
def test_a_pair_without_a_preference_is_named(row, said, chat_folder, tmp_path):  # noqa: F811
    good = dict(prompt="p", chosen="4", rejected="5")
    found = examples(chat_folder, tmp_path / "rows.jsonl", [good, row], PREFERENCES)
    assert found.rows == [0] and said in found.warnings[0]


def test_conversations_that_hold_their_prompt_are_pairs(chat_folder, tmp_path):  # noqa: F811
    other = [*ASKED_AND_TOLD[:1], {"role": "assistant", "content": "5"}]
    rows = [dict(chosen=ASKED_AND_TOLD, rejected=other), dict(prompt=ASKED["content"], chosen="4", rejected="5")]
    one, same = (examples(chat_folder, tmp_path / "rows.jsonl", [row], PREFERENCES).all()[0] for row in rows)
    assert one.token_ids == same.token_ids and one.answers == same.answers
    assert [(answer.text, answer.value) for answer in one.answers] == [("4", 1.0), ("5", -1.0)]


def test_a_margin_is_a_number_and_a_score_is_at_the_last_token(chat_folder, tmp_path):  # noqa: F811
    margins = 0.5, "much", -1, math.nan, math.inf, True
    rows = [dict(prompt="p", chosen="4", rejected="5", margin=margin) for margin in margins]
    found = examples(chat_folder, tmp_path / "rows.jsonl", rows, SCORED_PAIRS)
    assert found.rows == [0] and "column `margin` must be a number of at least 0 (got 'much')" in found.warnings[0]
    (chosen, rejected), prompt = found.all()[0].answers, found.all()[0].token_ids
    assert (chosen.value, rejected.value) == (0.5, 0.0) and sum(chosen.written) == 1 and chosen.written[-1]
    assert prompt and found.last_tokens == {chosen.token_ids[-1], rejected.token_ids[-1]}


def test_labels_are_booleans_of_both_kinds_and_prompts_meet_the_next_response(chat_folder, tmp_path):  # noqa: F811
    def read(*labels, **data):
        rows = [dict(prompt=f"p{i}", completion=str(i), label=label) for i, label in enumerate(labels)]
        return examples(chat_folder, tmp_path / "rows.jsonl", rows, LABELED, **data)

    found = read(True, "yes", False, 1, None)
    assert found.rows == [0, 2] and "column `label` must be true or false (got 'yes')" in found.warnings[0]
    texts = [[(answer.text, answer.value) for answer in example.answers] for example in found.all()]
    assert texts == [[("0", 1.0), ("2", 0.0)], [("2", -1.0), ("0", 0.0)]]
    with pytest.raises(ValueError, match="`label` is false in all rows"):
        read(False, False)
    with pytest.raises(
        ValueError, match=r"row 2: column `label`(.|\n)*row 6[^\n]*\n.*6 rows are bad; correct"
    ) as error:
        read(True, False, *[None] * 6, bad_rows="refuse")
    assert str(error.value).count("\n") == 5
