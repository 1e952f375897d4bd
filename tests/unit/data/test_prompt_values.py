"""Prompts as rows hold them: parts, messages as text, and prompts that were rendered before."""

import json

import pytest
from tokenizers import AddedToken, models, pre_tokenizers, processors
from tokenizers import Tokenizer as RawTokenizer

from megagrpo.config import DataSection, RunConfig
from megagrpo.data.prompt_values import as_prompt
from megagrpo.data.prompts import PromptSource, prompt_reader
from megagrpo.data.tokens.sampling import sampling_of
from megagrpo.data.tokens.tokenizer import Tokenizer as HuggingFaceTokenizer
from megagrpo.trainer.evaluation.sets import load_sets
from tests.unit.for_each import for_each

USER = {"role": "user", "content": "2 + 2?"}
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": None}}}
TEMPLATES = {
    "chatml": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor "
    "%}<|im_start|>assistant\n<think>\n",
    "llama 2": "{{ bos_token }}{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}",
    "gemma": "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content }}<end_of_turn>\n{% "
    "endfor %}",
    "r1": "{{ bos_token }}Use <think>, <answer>.{% for m in messages %}<｜User｜>{{ m.content }}{% endfor "
    "%}<｜Assistant｜><think>\n",
    "plain words": "### Instruction:\n{% for m in messages %}{{ m.content }}{% endfor %}\n### Response:\n",
    "one of its own": "{% for m in messages %}Next: [TURN]{{ m.content }}{% endfor %}[/TURN]",
}
MARKS = ["<|im_start|>", "[INST]", "<start_of_turn>", "<｜User｜>", "### Instruction:", "[TURN]"]


def made(kind: str):
    """A tokenizer of characters whose BOS is <s>. `hf with bos` adds it, `hf with two` adds [gMASK]<sop> as GLM's
    does."""
    from transformers import PreTrainedTokenizerFast

    raw = RawTokenizer(models.WordLevel({c: i for i, c in enumerate(map(chr, range(10, 127)))}, unk_token=" "))
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    raw.add_special_tokens(
        [AddedToken(text, special=True) for text in ("<s>", "[gMASK]", "<sop>", "<|im_start|>", "</s>")]
    )
    ids = {text: raw.token_to_id(text) for text in ("<s>", "[gMASK]", "<sop>")}
    beginning = {"hf with bos": "<s> $A", "hf with two": "[gMASK] <sop> $A"}.get(kind)
    if beginning:
        raw.post_processor = processors.TemplateProcessing(single=beginning, special_tokens=list(ids.items()))
    return HuggingFaceTokenizer(PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>"))


@pytest.fixture(scope="module")
def tokenizers():
    kinds = ("hf", "hf with bos", "hf with two")
    return {kind: made(kind) for kind in kinds}


def source(tokenizer, tmp_path, prompts, **data):
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in prompts))
    section = DataSection(train={"source": str(tmp_path / "rows.jsonl")}, **data)
    return PromptSource(section.train, section, tokenizer, 1000, 0)


# ----------------------------------------------------------------------------------------------------- rendered prompts


@pytest.mark.parametrize(("kind", "bos"), [("hf", ""), ("hf with bos", "<s>"), ("hf with two", "[gMASK]<sop>")])
def test_plain_text_begins_with_one_bos_whoever_wrote_it(tokenizers, tmp_path, kind, bos):
    tokenizer = tokenizers[kind]
    texts = ["2 + 2?", bos + "2 + 2?", f"\n {bos}2 + 2?"]
    prompts = source(tokenizer, tmp_path, texts, chat_template="none")
    plain, rendered, after_space = (list(prompt.token_ids) for prompt in prompts.all())
    once = tokenizer.encode("", add_special_tokens=True)
    assert len(once) == bos.count(">") + bos.count("]") and plain == tokenizer.encode("2 + 2?", add_special_tokens=True)
    assert rendered == (plain if bos else tokenizer.encode(texts[1], add_special_tokens=False))
    assert after_space == (rendered if bos else tokenizer.encode(texts[2], add_special_tokens=False))
    assert prompts.warnings == []


@for_each("kind", ["hf", "hf with bos"])
@for_each(("template", "mark"), list(zip(TEMPLATES, MARKS, strict=True)))
def test_a_prompt_that_holds_the_template_s_text_is_a_warning(tokenizers, tmp_path, kind, template, mark):
    tokenizer = tokenizers[kind]
    if kind == "hf" and template == "plain words":  # the mark is also a mark inside messages
        rendered = [{"role": "user", "content": "### Instruction:\nAdd.\n### Response:\n"}]
    else:
        rendered = tokenizer.rendered("Add.", None, TEMPLATES[template])
    plain = ["Add.", "Write <think>, [1] and <answer>.", "Use <b> and ### Instruction:", [USER], "Mid <s> text"]
    found = source(tokenizer, tmp_path, [*plain, rendered, rendered], chat_template=TEMPLATES[template]).warnings
    first = "<s>" if "bos_token" in TEMPLATES[template] else mark
    assert found == [
        f"data.train: 2 of 7 prompts already hold `{first}` (first: row 5), and the chat template renders them again; "
        "for rendered prompts set data.chat_template: none, else remove the token"
    ]
    assert source(tokenizer, tmp_path, plain, chat_template=TEMPLATES[template]).warnings == []
    inside = [[{"role": "user", "content": f"Add. {mark}"}]]
    assert bool(source(tokenizer, tmp_path, inside, chat_template=TEMPLATES[template]).warnings) is (mark[0] in "<[")


def test_a_prompt_in_another_model_s_format_is_a_warning(tokenizers, tmp_path):
    prompts = source(
        tokenizers["hf"],
        tmp_path,
        ["<|start_header_id|>user<|end_header_id|>\n\nHi"],
        chat_template=TEMPLATES["chatml"],
    )
    assert "1 of 1 prompts already hold `<|start_header_id|>` (first: row 0)" in prompts.warnings[0]


def test_rendered_prompts_of_a_held_out_set_are_a_warning(tokenizers, tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "[INST] Hi [/INST]"}))
    section = {"source": str(tmp_path / "rows.jsonl")}
    data = {"train": section, "eval": section, "chat_template": TEMPLATES["llama 2"]}
    config = RunConfig.model_validate(
        {"model": {"path": "m"}, "data": data, "rewards": {"functions": [{"function": "format"}]}}
    )
    (held_out,) = load_sets(config.each_task[0], sampling_of(config.rollout), prompt_reader(config, tokenizers["hf"]))
    assert [warning[:50] for warning in held_out.warnings] == ["data.eval: 1 of 1 prompts already hold `[INST]` (f"]


# ------------------------------------------------------------------------------------------------------------- messages


@for_each(
    ("stored", "prompt"),
    [
        ("text", "text"),
        ("", ""),
        ("[1, 2]", "[1, 2]"),
        ('[{"a": 1}]', '[{"a": 1}]'),
        ([USER], [USER]),
        (
            [
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "2 + "}, {"type": "text", "text": "2?", "image": None}],
                }
            ],
            [USER],
        ),
        ([{"role": "user", "content": ["2 + ", {"type": "input_text", "text": "2?"}]}], [USER]),
        (
            [{"role": "developer", "content": ""}, USER | {"name": "n"}],
            [{"role": "developer", "content": ""}, USER | {"name": "n"}],
        ),
        (
            [
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "1", "content": "4"},
            ],
            [
                {"role": "assistant", "content": "", "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "1", "content": "4"},
            ],
        ),
        (json.dumps([USER]), [USER]),
        (json.dumps([{"content": [{"type": "text", "text": "2 + 2?"}], "role": "user"}], indent=1), [USER]),
        (str([USER, USER]), [USER, USER]),
    ],
)
def test_a_stored_prompt_becomes_text_or_messages(stored, prompt):
    assert as_prompt(stored) == prompt


def test_fields_that_arrow_added_are_left_out(tmp_path):
    import datasets

    calls = [CALL, CALL | {"function": {"name": "neg", "arguments": {"x": 1}}}]
    rows = [
        {
            "prompt": [
                USER,
                {"role": "assistant", "content": None, "tool_calls": calls},
                {"role": "tool", "content": "4"},
            ]
        }
    ]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    section = DataSection(train={"source": str(tmp_path / "a.parquet")}, chat_template="{{ messages }}")
    (prompt,) = PromptSource(section.train, section, made("hf"), 1000, 0).all()
    said = prompt.messages[1]["tool_calls"]
    assert (
        said[1] == calls[1] and said[0]["function"]["arguments"] == {"a": 2} and "tool_calls" not in prompt.messages[2]
    )


@for_each(
    ("stored", "message"),
    [
        (None, "must be a string or chat messages (got None)"),
        (3, "must be a string or chat messages (got 3)"),
        ([], "must be a string or chat messages (got [])"),
        (USER, "must be a string or chat messages (got {'role'"),
        ([{"content": "x"}], "must be a string or chat messages (got [{'content'"),
        ([{"from": "human", "value": "x"}], "these are ShareGPT's names"),
        ([USER, {"role": "user"}], "must be chat messages whose content is text; message 1 has None"),
        ([{"role": "user", "content": 4}], "must be chat messages whose content is text; message 0 has 4"),
        (
            [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}],
            "message 0 has a part of type `image`: set data.images, or remove the part",
        ),
        (
            [USER, {"role": "user", "content": [{"type": "input_audio", "text": None}]}],
            "message 1 has a part of type `input_audio`",
        ),
        (
            [{"role": "user", "content": [{"text": 3}]}],
            "must be text; message 0 has a part {'text': 3}: remove the part, or the row",
        ),
        ('[{"role": "user", "content": "x"', "begins like chat messages, and is not valid JSON ("),
        ("a\ud800", r"holds '\ud800', half a character, which no tokenizer knows; remove it"),
    ],
)
def test_what_is_no_prompt_is_refused_with_its_row(tmp_path, stored, message):
    with pytest.raises(ValueError) as error:
        source(made("hf"), tmp_path, ["fine", stored], chat_template=TEMPLATES["chatml"])
    assert str(error.value).startswith("data.train: row 1: column `prompt` ") and message in str(error.value)


# --------------------------------------------------------------------------------------------------------------- fields


def test_a_field_that_a_row_lacks_is_none_for_rewards_and_an_error_for_the_prompt(tmp_path):
    rows = [{"p": {"q": "a"}, "info": None}, {"p": {"q": "b"}, "info": {"gold": "1"}}, {"p": {"q": "c"}, "info": {}}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, [*rows, {"p": {}}])))
    section = DataSection(
        train={"source": str(tmp_path / "a.jsonl"), "size": 3}, prompt_column="p.q", columns={"answer": "info.gold"}
    )
    prompts = PromptSource(section.train, section, made("hf"), 1000, 0)
    assert [prompt.columns["answer"] for prompt in prompts.all()] == [None, "1", None]
    section = DataSection(train={"source": str(tmp_path / "a.jsonl")}, prompt_column="p.q")
    with pytest.raises(
        ValueError, match=r"^data\.train: row 3 has no `p\.q` \(data\.prompt_column\); add it, or remove the row$"
    ):
        PromptSource(section.train, section, made("hf"), 1000, 0)
