"""Prompts from real files, folders and generators: order, resuming, columns, lengths, and refused inputs."""

import json
import math
import pickle
import shutil
import sys
from collections import Counter
from decimal import Decimal
from hashlib import blake2b
from pathlib import Path

import huggingface_hub
import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import models, pre_tokenizers

from megagrpo.config import DataSection, DatasetSection, load_config
from megagrpo.data.prompts import PromptSource, prompt_reader
from megagrpo.data.sources.data_identity import DataIdentity
from megagrpo.data.sources.prompt_order import PromptOrder
from megagrpo.data.tokens.tokenizer import Tokenizer as HuggingFaceTokenizer
from megagrpo.train_types import TrainState
from tests.unit.for_each import for_each

ADDITION = Path(__file__).parents[3] / "configs" / "data"
ROWS = [{"prompt": f"What is {n} + {n}?", "answer": str(2 * n), "level": n} for n in range(10)]


@pytest.fixture(scope="module")
def tokenizer():
    """One token per character; its template writes [system|]user>."""
    from transformers import PreTrainedTokenizerFast

    vocabulary = {c: i for i, c in enumerate(map(chr, range(32, 127)))}
    raw = RawTokenizer(models.WordLevel(vocabulary, unk_token=" "))
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="~")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{{ '|' if m.role == 'system' else '' }}{% endfor %}>"
    )
    return HuggingFaceTokenizer(tokenizer)


@pytest.fixture(scope="module")
def jsonl(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def source(tokenizer, path, *, seed=0, limit=100, dataset=None, evaluate=False, **data) -> PromptSource:
    section = {"source": str(path), **(dataset or {})}
    config = DataSection(train=section, eval=section if evaluate else None, **data)
    key = "data.eval" if evaluate else "data.train"
    return PromptSource(config.eval if evaluate else config.train, config, tokenizer, limit, seed, key)


def text(tokenizer, prompt) -> str:
    return "".join(tokenizer.tokenizer.convert_ids_to_tokens(prompt.token_ids))


def ids(prompts) -> list[int]:
    return [p.prompt_id for p in prompts]


def test_ranks_without_the_data_set_draw_the_same_rows(tokenizer, tmp_path):
    jsonl = tmp_path / "rows.jsonl"
    jsonl.write_text("".join(json.dumps({"prompt": "word" * (1 + (n in (2, 6)))}) + "\n" for n in range(10)))
    limits = {"limit": 5, "overlong_prompts": "drop"}  # rows 2 and 6 are longer
    for data in ({}, {"shuffle": False}, {"curriculum": [0.1, 0.9], "curriculum_rest": 2}):
        leader = source(tokenizer, jsonl, seed=3, **limits, **data)
        section = DataSection(train={"source": str(jsonl)}, overlong_prompts="drop", **data)
        other = PromptOrder(pickle.loads(pickle.dumps(leader.rows)), section, 3)
        assert len(other) == len(leader) == 8
        for _ in range(8):
            drawn, same = leader.next(7), other.next(7)
            assert [(p.prompt_id, p.position) for p in drawn] == [(p.prompt_id, p.position) for p in same]
            rates = {p.prompt_id: (p.prompt_id % 3) / 2 for p in drawn}
            assert leader.learn(rates) == other.learn(rates) and leader.cursor == other.cursor
        assert other.columns == [] and not any(p.token_ids for p in other.all())


def test_each_epoch_gives_every_prompt_once_in_the_documented_order(tokenizer, jsonl):
    prompts = source(tokenizer, jsonl, seed=5)
    expected = [
        sorted(range(10), key=lambda row: blake2b(f"5/{epoch}/{row}".encode(), digest_size=16).digest())
        for epoch in range(3)
    ]
    assert ids(prompts.next(30)) == [*expected[0], *expected[1], *expected[2]]
    assert expected[0] != expected[1] != list(range(10)) and prompts.cursor == 30 and len(prompts) == 10
    assert ids(source(tokenizer, jsonl, seed=6).next(10)) != expected[0]


def test_a_set_cursor_continues_as_if_never_interrupted(tokenizer, jsonl):
    whole = source(tokenizer, jsonl).next(36)
    for stop in (0, 1, 9, 10, 17, 20):
        first, second = source(tokenizer, jsonl), source(tokenizer, jsonl)
        before = first.next(stop)
        second.cursor = first.cursor
        rest = [p for _ in range(4) for p in second.next(4)]
        assert before + rest == whole[: stop + 16]
    with pytest.raises(ValueError, match="cursor -1"):
        source(tokenizer, jsonl).cursor = -1


def write(folder, numbers, answer="2", name="rows.jsonl"):
    rows = [{"prompt": f"What is {n} + {n}?", "answer": answer} for n in numbers]
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / name


@for_each(
    ("stops", "data"),
    [
        (stops, {"shuffle": shuffle})
        for shuffle in (True, False)
        for stops in ([12], [0], [20], [33], [5, 3, 30], [7, 45, 0])
    ],
)
def test_appended_rows_are_drawn_in_the_epoch_that_sees_them_and_none_twice(tokenizer, tmp_path, stops, data):
    """After each number of draws the run resumes with 4 more rows; at the end it resumes with the same rows."""
    drawn, seen, state = 0, set(), TrainState()
    for resumed, count in enumerate([*stops, 5, 100]):
        size = 20 + 4 * min(resumed, len(stops))
        order = source(tokenizer, write(tmp_path, range(size)), seed=3, **data)
        alone = PromptOrder(order.rows, DataSection(train={"source": "rows"}, **data), 3)  # a rank without the rows
        if resumed:
            kept = order.identity.kept_rows(state.data)
            assert kept == (size - 4 if resumed <= len(stops) else None)
            for restored in (order, alone):
                restored.restore(state)
                if kept is not None:
                    restored.join(state, kept)
        for row in ids(order.next(count)):
            assert row < size and row not in seen
            seen = {*seen, row} if len(seen) < size - 1 else set()  # a new epoch
        assert [p.position for p in alone.next(count)] == list(range(drawn, drawn + count))
        drawn += count
        assert order.cursor == alone.cursor == drawn and order.peek(9)[8].prompt_id == alone.peek(9)[8].prompt_id
        order.store(state)
        state.data = json.loads(json.dumps(state.data))  # as in a checkpoint


def test_a_checkpoint_names_its_data_and_tells_appended_rows_from_other_data(tokenizer, tmp_path):
    first, state = source(tokenizer, write(tmp_path, range(6))), TrainState()
    first.store(state)
    assert state.data["name"] == f"{tmp_path}/rows.jsonl train" and state.data["rows"] == 6
    for kept, numbers, more in (
        (None, range(6), {"name": "moved.jsonl"}),
        (6, range(8), {}),
        (0, range(5), {}),
        (0, range(6), {"answer": "3"}),
        (0, range(1, 7), {}),
    ):
        assert source(tokenizer, write(tmp_path, numbers, **more)).identity.kept_rows(state.data) == kept
    assert first.identity.kept_rows({}) is None  # of an older version
    config = load_config("megagrpo:quickstart", [f"data.train.source={tmp_path}/rows.jsonl"])
    for is_first in (True, False):  # only rank 0 compares the rows
        read = prompt_reader(config, tokenizer, first=is_first)(config.data.train, config.data, "data.train")
        assert (read.identity is not None) == is_first


def test_a_checksum_is_that_of_the_values_in_every_process(tokenizer):
    """Not of a file's format, the order of columns or sets, or addresses; and odd values raise nothing."""
    nested = 1
    for _ in range(5000):
        nested = [nested]
    odd = [{(1, 2): 3}, {1: 2, "a": 3}, nested, {"a", "b"}, Decimal("1.10"), "\ud800", math.nan, object()]
    image = {"bytes": b"\x00\xff", "path": None}

    def checksum(row):
        identity = DataIdentity(DatasetSection(source="a"))
        identity.add(row)
        return identity.state()["checksum"]

    row = {"prompt": "p", "answer": 3, "image": image}
    assert checksum(row) == checksum({"answer": 3, "image": dict(image), "prompt": "p", "absent": None})
    changed = [row | {"prompt": "q"}, row | {"answer": "3"}, row | {"image": image | {"bytes": b"\x00"}}]
    assert len({checksum(one) for one in [row, *changed]}) == 4
    for value in odd:
        assert checksum(row | {"odd": value}) != checksum(row)
    assert checksum({"odd": object()}) == checksum({"odd": object()})


def test_other_data_begins_the_epoch_anew(tokenizer, tmp_path):
    first, state = source(tokenizer, write(tmp_path, range(6))), TrainState()
    first.next(9)
    first.store(state)
    second = source(tokenizer, write(tmp_path, range(100, 110)))
    second.restore(state)
    second.join(state, second.identity.kept_rows(state.data))
    assert [p.position for p in second.peek(2)] == [9, 10] and second.curriculum.history == []
    assert sorted(ids(second.next(10))) == sorted(ids(second.next(10))) == list(range(10))


def test_a_peek_shows_what_will_be_drawn_and_draws_nothing(tokenizer, jsonl):
    peeked, plain = source(tokenizer, jsonl), source(tokenizer, jsonl)
    for n in (1, len(plain), 2):
        shown = peeked.peek(n + 3)
        assert peeked.cursor == plain.cursor and peeked.next(n) == plain.next(n) == shown[:n]
        assert [prompt.position for prompt in shown] == list(range(peeked.cursor - n, peeked.cursor + 3))


def test_a_prompt_carries_its_tokens_text_and_columns(tokenizer, jsonl):
    prompt = source(tokenizer, jsonl, shuffle=False).next(4)[3]
    assert (
        prompt.prompt_id == 3 and prompt.messages == "What is 3 + 3?" and text(tokenizer, prompt) == "What is 3 + 3?>"
    )
    assert prompt.columns == {"answer": "6", "level": 3}


def test_without_shuffle_and_in_all_prompts_come_as_in_the_data_set(tokenizer, jsonl):
    plain, shuffled = source(tokenizer, jsonl, shuffle=False), source(tokenizer, jsonl)
    assert ids(plain.next(12)) == [*range(10), 0, 1]
    shuffled.next(3)
    assert ids(shuffled.all()) == list(range(10)) and shuffled.cursor == 3


def test_columns_are_renamed_beside_the_originals(tokenizer, jsonl):
    prompts = source(tokenizer, jsonl, columns={"solution": "answer"})
    assert prompts.columns == ["answer", "level", "solution"]
    assert prompts.all()[4].columns == {"answer": "8", "level": 4, "solution": "8"}


def test_a_column_can_be_cut_to_the_answer_behind_its_hashes(tokenizer, tmp_path):
    path = tmp_path / "gsm8k.jsonl"
    answers = ["8 * 9 = 72.\n#### 72", "no hashes", "#### 1,000 #### 2", "####"]
    path.write_text("".join(json.dumps({"prompt": "Q", "answer": answer}) + "\n" for answer in answers))
    prompts = source(tokenizer, path, columns={"solution": "answer"}, extract_hash_answer=["solution"]).all()
    assert [p.columns["solution"] for p in prompts] == ["72", None, "1,000", ""]
    assert [p.columns["answer"] for p in prompts] == answers
    prompts = source(tokenizer, path, extract_hash_answer=["answer"]).all()
    assert [p.columns["answer"] for p in prompts] == ["72", None, "1,000", ""]
    with pytest.raises(ValueError) as error:
        source(tokenizer, path, extract_hash_answer=["answr", "gold"])
    assert (
        "data.extract_hash_answer: data.train has no column `answr`; it has prompt, answer; did you mean `answer`?"
        in str(error.value)
    )
    assert "no column `gold`" in str(error.value)


def test_system_prompt_and_template_go_into_the_tokens_only(tokenizer, jsonl):
    prompt = source(tokenizer, jsonl, system_prompt="Add.").all()[1]
    assert text(tokenizer, prompt) == "Add.|What is 1 + 1?>" and prompt.messages == "What is 1 + 1?"
    prompt = source(tokenizer, jsonl, chat_template="none").all()[1]
    assert text(tokenizer, prompt) == "What is 1 + 1?"


def test_messages_come_through_arrow_without_empty_keys(tokenizer, tmp_path):
    import datasets

    rows = [
        {"chat": [{"role": "system", "content": "S"}, {"role": "user", "content": "U", "name": "n"}], "answer": 1},
        {"chat": [{"role": "user", "content": "V"}], "answer": 2},
    ]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "chat.parquet")
    first, second = source(tokenizer, tmp_path / "chat.parquet", prompt_column="chat").all()
    assert first.messages == rows[0]["chat"] and text(tokenizer, first) == "S|U>"
    assert second.messages == rows[1]["chat"] and second.columns["answer"] == 2


@pytest.mark.parametrize(
    "kind", ["json", "parquet", "csv", "folder of files", "save_to_disk", "save_to_disk with splits"]
)
def test_every_kind_of_source_gives_the_same_prompts(tokenizer, jsonl, tmp_path, kind):
    import datasets

    data, path = datasets.Dataset.from_list(ROWS), tmp_path / f"rows.{kind}"
    if kind == "json":
        path.write_text(json.dumps(ROWS))
    elif kind == "parquet":
        data.to_parquet(path)
    elif kind == "csv":
        data.to_csv(path)
    elif kind == "folder of files":
        path.mkdir()
        shutil.copy(jsonl, path / "train.jsonl")
    elif kind == "save_to_disk":
        data.save_to_disk(path)
    else:
        datasets.DatasetDict({"train": data, "test": data.select([0])}).save_to_disk(path)
    wanted = source(tokenizer, jsonl).next(15)
    found = source(tokenizer, path).next(15)
    assert [(p.prompt_id, p.token_ids) for p in found] == [(p.prompt_id, p.token_ids) for p in wanted]
    assert ids(source(tokenizer, path, dataset={"split": "train[2:5]"}, shuffle=False).next(3)) == [0, 1, 2]
    assert source(tokenizer, path, dataset={"split": "train[2:5]"}).all()[0].messages == "What is 2 + 2?"
    assert len(source(tokenizer, path, dataset={"size": 4})) == 4


def test_size_keeps_the_first_rows_of_the_split(tokenizer, jsonl):
    prompts = source(tokenizer, jsonl, dataset={"split": "train[2:9]", "size": 4}).all()
    assert [p.messages for p in prompts] == [row["prompt"] for row in ROWS[2:6]]
    assert len(source(tokenizer, jsonl, dataset={"size": 40})) == len(ROWS)  # never more rows than the file has


def test_a_file_answers_to_any_split_name(tokenizer, jsonl):
    assert len(source(tokenizer, jsonl, dataset={"split": "test"})) == 10
    assert len(source(tokenizer, jsonl, dataset={"split": "validation[:3]"})) == 3


def test_relative_paths_count_from_the_current_folder(tokenizer, tmp_path, monkeypatch):
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    monkeypatch.chdir(tmp_path)
    assert len(source(tokenizer, "rows.jsonl")) == 1


@pytest.mark.parametrize("mode, kept, longest", [("drop", [0, 2], 4), ("truncate_left", [0, 1, 2, 3], 4)])
def test_overlong_prompts_are_counted_and_dropped_or_cut_on_the_left(tokenizer, tmp_path, mode, kept, longest):
    (tmp_path / "p.jsonl").write_text(
        "".join(json.dumps({"prompt": p}) + "\n" for p in ("abc", "abcd", "ab", "abcdefgh"))
    )
    prompts = source(tokenizer, tmp_path / "p.jsonl", limit=4, overlong_prompts=mode)
    assert prompts.num_overlong == 2 and ids(prompts.all()) == kept and sorted(ids(prompts.next(len(kept)))) == kept
    assert max(len(p.token_ids) for p in prompts.all()) == longest
    if mode == "truncate_left":
        assert text(tokenizer, prompts.all()[3]) == "fgh>"


def test_dropping_a_prompt_leaves_the_order_of_the_others(tokenizer, tmp_path, jsonl):
    rows = [*ROWS[:4], {**ROWS[4], "prompt": "x" * 200}, *ROWS[5:]]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    full, without = source(tokenizer, jsonl).next(10), source(tokenizer, tmp_path / "p.jsonl").next(9)
    assert ids(without) == [i for i in ids(full) if i != 4]


def test_reasoning_gym_gives_questions_and_what_its_scorer_needs(tokenizer):
    options = {"size": 6, "options": {"min_terms": 2, "max_terms": 2}}
    train = source(tokenizer, "reasoning_gym:chain_sum", dataset=options, seed=3)
    prompt = train.all()[0]
    assert prompt.messages == prompt.columns["question"] and len(train) == 6
    assert (
        set(prompt.columns) == {"question", "answer", "metadata"}
        and prompt.columns["metadata"]["source_dataset"] == "chain_sum"
    )
    assert train.all() == source(tokenizer, "reasoning_gym:chain_sum", dataset=options, seed=3).all()
    held_out = source(tokenizer, "reasoning_gym:chain_sum", dataset=options, seed=3, evaluate=True)
    assert not {p.messages for p in train.all()} & {p.messages for p in held_out.all()}
    pinned = {**options, "options": {**options["options"], "seed": 3}}
    assert source(tokenizer, "reasoning_gym:chain_sum", dataset=pinned, seed=9, evaluate=True).all() == train.all()


def test_a_field_of_a_column_is_a_column_for_the_prompt_and_for_rewards(tokenizer, tmp_path):
    """The rows of verl."""
    row = {
        "data_source": "gsm8k",
        "prompt": [{"role": "user", "content": "2 + 2?"}],
        "reward_model": {"style": "rule", "ground_truth": 4},
    }
    (tmp_path / "verl.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(row | {"extra_info": {"text": "3 + 3?"}}))
    prompts = source(tokenizer, tmp_path / "verl.jsonl", columns={"answer": "reward_model.ground_truth"})
    assert prompts.all()[0].columns["answer"] == 4 and prompts.all()[0].columns["reward_model"] == row["reward_model"]
    with pytest.raises(
        ValueError,
        match=r"data.columns.answer: .* no column `answer`; it has .*; did you mean `reward_model.ground_truth`\?",
    ):
        source(tokenizer, tmp_path / "verl.jsonl", columns={"answer": "answer"})


def test_rows_of_sharegpt_get_a_hint(tokenizer, tmp_path):
    (tmp_path / "s.jsonl").write_text(
        json.dumps({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]})
    )
    with pytest.raises(
        ValueError,
        match=r"`conversations` is ShareGPT's: rename it, `from` to role and `value` to content, and end with",
    ):
        source(tokenizer, tmp_path / "s.jsonl")
    with pytest.raises(
        ValueError,
        match=r"these are ShareGPT's names: rename `from` to role, `value` to content, and end with the user's",
    ):
        source(tokenizer, tmp_path / "s.jsonl", prompt_column="conversations")


@for_each(
    "path, arguments, expected",
    [
        ("missing.jsonl", {}, ["data.train.source: no file or folder", "missing.jsonl"]),
        ("./missing", {}, ["data.train.source: no file or folder"]),
        ("missing.jsonl", {"evaluate": True}, ["data.eval.source: no file or folder"]),
        ("nobody/nothing", {}, ["data.train.source: nobody/nothing is not a local file or folder", "hub"]),
        ("empty.jsonl", {}, ["data.train.source: ", "empty.jsonl is empty (0 bytes); name a file with rows"]),
        ("empty.parquet", {}, ["empty.parquet has columns, but no rows; name a file with rows"]),
        (
            "broken.jsonl",
            {},
            ["data.train.source", "broken.jsonl cannot be loaded: line 1, column 15 is not valid JSON: Expecting"],
        ),
        ("https://a.b/rows.jsonl", {}, ["data.train.source: https://a.b/rows.jsonl is an address; download the file"]),
        (
            "notes.txt",
            {},
            ["must end in one of .jsonl, .ndjson, .json, .csv, .tsv, .parquet, .arrow; convert or rename"],
        ),
        (
            "rows.jsonl",
            {"prompt_column": "promt"},
            ["no column `promt`; it has prompt, answer, level; did you mean `prompt`?"],
        ),
        (
            "rows.jsonl",
            {"columns": {"solution": "anser"}},
            ["data.columns.solution", "`anser`", "did you mean `answer`?"],
        ),
        (
            "rows.jsonl",
            {"prompt_column": "level"},
            ["row 0", "column `level` must be a string or chat messages (got 0)"],
        ),
        (
            "rows.jsonl",
            {"limit": 5},
            ["all prompts are dropped", "10 of 10 prompts", "max_prompt_length 5", "longest: 15 tokens"],
        ),
        ("rows.jsonl", {"limit": 5, "overlong_prompts": "error"}, ["10 of 10 prompts", "set data.overlong_prompts"]),
        (
            "rows.jsonl",
            {"dataset": {"options": {"seed": 1}}},
            ["data.train.options: only reasoning_gym:FAMILY has options"],
        ),
        ("rows.jsonl", {"dataset": {"split": "train[5:5]"}}, ["(split train[5:5]) has no rows"]),
        ("saved", {"dataset": {"split": "tset"}}, ["no split `tset`; it has train, test"]),
        ("reasoning_gym:chain_sun", {}, ["no family `chain_sun`; did you mean `chain_sum`?"]),
        (
            "reasoning_gym:gcd",
            {"dataset": {"options": {"max_nums": 3}}},
            ["data.train.options.max_nums", "did you mean `max_numbers`?"],
        ),
        (
            "reasoning_gym:gcd",
            {"dataset": {"options": {"min_numbers": 9, "max_numbers": 3}}},
            ["reasoning-gym's `gcd` rejects", "max_numbers"],
        ),
    ],
)
def test_what_cannot_be_used_is_refused_with_its_key(
    tokenizer, jsonl, tmp_path, monkeypatch, path, arguments, expected
):
    import datasets

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    shutil.copy(jsonl, "rows.jsonl")
    Path("empty.jsonl").touch()
    Path("notes.txt").write_text("x")
    Path("broken.jsonl").write_text('{"prompt": "a"\n{{{')
    datasets.Dataset.from_list(ROWS).select([]).to_parquet("empty.parquet")
    datasets.DatasetDict(
        {"train": datasets.Dataset.from_list(ROWS), "test": datasets.Dataset.from_list(ROWS)}
    ).save_to_disk("saved")
    with pytest.raises(ValueError) as error:
        source(tokenizer, path, **arguments)
    for part in expected:
        assert part in str(error.value)


def test_the_addition_files_hold_every_pair_once_and_keep_mirror_pairs_together(tokenizer):
    train, held_out = (source(tokenizer, ADDITION / f"addition_{name}.jsonl").all() for name in ("train", "heldout"))
    assert len(train) == 57 and len(held_out) == 24
    pairs = [
        {tuple(int(w.strip("?")) for w in p.messages.split() if w.strip("?").isdigit()) for p in split}
        for split in (train, held_out)
    ]
    assert Counter(pairs[0]) + Counter(pairs[1]) == Counter((a, b) for a in range(1, 10) for b in range(1, 10))
    assert pairs[1] == {(b, a) for a, b in pairs[1]} == {(a, b) for a, b in pairs[0] | pairs[1] if abs(a - b) % 3 == 2}
    for prompt in train + held_out:
        a, b = (int(w.strip("?")) for w in prompt.messages.split()[2::2])
        assert prompt.columns == {"answer": str(a + b)} and prompt.messages == f"What is {a} + {b}?"


def test_without_reasoning_gym_the_extra_is_named(tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    with pytest.raises(
        ValueError,
        match=r"data\.train\.source: reasoning_gym:gcd needs the package reasoning-gym; run `megagrpo install data`",
    ):
        source(tokenizer, "reasoning_gym:gcd")
