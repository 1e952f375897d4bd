"""Variables of chat templates, and the thoughts that templates open for a response."""

import json

import pytest

from megagrpo.config import load_config
from megagrpo.data.prompts import PromptSource
from megagrpo.data.tokens.assistant_mask import masked_chat, masked_text
from megagrpo.data.tokens.chat_templates import check_kwargs, opened_thought, variables
from megagrpo.data.tokens.sampling import sampling_of
from megagrpo.data.tokens.tokenizer import load_tokenizer, tokenizer_of
from tests.unit.data.test_tokenizer import CHATML, LLAMA_2, base_folder, chat_folder  # noqa: F401
from tests.unit.for_each import for_each

# The ends of the generation prompts of public templates, after a ChatML beginning.
TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
HEADER = "{% if add_generation_prompt %}<|im_start|>assistant\n"
QWEN3 = (
    TURNS
    + HEADER
    + "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
QWEN3_THINKING = TURNS + HEADER + "<think>\n{% endif %}"
QWEN35 = (
    TURNS
    + HEADER
    + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif "
    "%}{% endif %}"
)
R1 = (
    "{% for m in messages %}<｜{{ m.role }}｜>{{ m.content.split('</think>')[-1] }}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜><think>\n{% endif %}"
)
DEEPSEEK_V31 = (
    "{% if not thinking is defined %}{% set thinking = false %}{% endif %}{% for m in messages %}{{ m.content }}{% "
    "endfor %}<｜Assistant｜>{{ '<think>' if thinking else '</think>' }}"
)
COMMAND_A = (
    "{% for m in messages %}{{ m.content }}{% endfor %}<|CHATBOT|><|START_THINKING|>{% if reasoning is false "
    "%}<|END_THINKING|>{% endif %}"
)
SEED = TURNS + HEADER + "<seed:think>{% endif %}"
GPT_OSS = (
    "{% if reasoning_effort is not defined %}{% set reasoning_effort = 'medium' %}{% endif %}Reasoning: {{ "
    "reasoning_effort }}\n" + TURNS
)
QUESTION = "What is 3?"


def source(folder, rows, **data):
    """The prompts of these rows, with the tokenizer that a run would load."""
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = run_config(folder, **data)
    return PromptSource(config.data.train, config.data, tokenizer_of(config, folder), 200, seed=0)


def run_config(folder, rollout=None, **data):
    text = {"model": {"path": str(folder)}, "data": {"train": {"source": str(folder / "rows.jsonl")}, **data}}
    text["rollout"] = rollout or {}
    (folder / "run.yaml").write_text(json.dumps(text | {"rewards": {"functions": [{"function": "format"}]}}))
    return load_config(folder / "run.yaml")


def prompt_of(folder, rows=({"prompt": QUESTION},), **data):
    """The first prompt as text, and what it opens."""
    prompts = source(folder, rows, **data)
    (prompt, *_) = prompts.all()
    return prompts._tokenizer.decode(prompt.token_ids, special=True), prompt.opened


@for_each(
    ("template", "kwargs", "end", "opened"),
    [
        (QWEN3, {}, "<|im_start|>assistant\n", ""),
        (QWEN3, {"enable_thinking": True}, "<|im_start|>assistant\n", ""),
        (QWEN3, {"enable_thinking": False}, "<|im_start|>assistant\n<think>\n\n</think>\n\n", ""),
        (QWEN3_THINKING, {}, "<|im_start|>assistant\n<think>\n", "<think>\n"),
        (QWEN35, {}, "assistant\n<think>\n", "<think>\n"),
        (QWEN35, {"enable_thinking": False}, "assistant\n<think>\n\n</think>\n\n", ""),
        (R1, {}, "<｜Assistant｜><think>\n", "<think>\n"),
        (DEEPSEEK_V31, {}, "<｜Assistant｜></think>", ""),
        (DEEPSEEK_V31, {"thinking": True}, "<｜Assistant｜><think>", "<think>"),
        (COMMAND_A, {}, "<|CHATBOT|><|START_THINKING|>", "<|START_THINKING|>"),
        (COMMAND_A, {"reasoning": False}, "<|CHATBOT|><|START_THINKING|><|END_THINKING|>", ""),
        (SEED, {}, "assistant\n<seed:think>", "<seed:think>"),
        (GPT_OSS, {"reasoning_effort": "low"}, "Reasoning: low\n<|im_start|>user\nWhat is 3?<|im_end|>\n", ""),
        ("Question: {{ messages[0].content }}\n<reasoning>", {}, "What is 3?\n<reasoning>", "<reasoning>"),
        ("none", {}, QUESTION, ""),
    ],
)
def test_a_template_gets_its_variables_and_says_what_it_opens(chat_folder, tmp_path, template, kwargs, end, opened):  # noqa: F811
    load_tokenizer(chat_folder).tokenizer.save_pretrained(tmp_path)
    text, found = prompt_of(tmp_path, chat_template=template, chat_template_kwargs=kwargs)
    assert text.endswith(end) and found == opened
    (tmp_path / "chat_template.jinja").write_text(template)
    # the tokenizer's own template
    assert template == "none" or prompt_of(tmp_path, chat_template_kwargs=kwargs) == (text, opened)


@for_each(
    ("prompt", "template", "opened"),
    [
        ("Show your work. Assistant: Let me think.\n<think>", "none", "<think>"),
        ("Put your thought into <think> tags.", "none", ""),
        ("Write </think>", QWEN3, ""),
        ("What does <think> mean? <think>", QWEN3, ""),  # in the user's turn
        (
            [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "<think>\nOkay, so"}],
            QWEN3,
            "<think>\nOkay, so",
        ),
        ([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "<think>a</think>b"}], QWEN3, ""),
        (
            [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "<think>a</think><think>"}],
            QWEN3,
            "<think>",
        ),
        ([{"role": "user", "content": "Hi <think>"}, {"role": "assistant", "content": "The"}], QWEN3, ""),
    ],
)
def test_a_thought_may_be_opened_by_the_prompt_itself(chat_folder, tmp_path, prompt, template, opened):  # noqa: F811
    load_tokenizer(chat_folder).tokenizer.save_pretrained(tmp_path)
    assert prompt_of(tmp_path, [{"prompt": prompt}], chat_template=template)[1] == opened


def test_a_row_has_variables_of_its_own(chat_folder, tmp_path):  # noqa: F811
    load_tokenizer(chat_folder).tokenizer.save_pretrained(tmp_path)
    own = [{"enable_thinking": False}, None, {"enable_thinking": True}]
    stored = [*own[:2], '{"enable_thinking": true}']
    rows = [{"prompt": QUESTION, "chat_template_kwargs": kwargs} for kwargs in stored]
    prompts = source(tmp_path, rows, chat_template=QWEN35, chat_template_kwargs={"enable_thinking": False})
    assert [prompt.opened for prompt in prompts.all()] == ["", "", "<think>\n"]
    assert [prompt.template_kwargs for prompt in prompts.all()] == [own[0], {}, own[2]]
    for value, said in [
        (
            {"enable_thnking": 1},
            "row 0: column `chat_template_kwargs`: .* does not use `enable_thnking`; did you mean `enable_thinking`",
        ),
        ({"tokenize": True}, "row 0: column `chat_template_kwargs`: `tokenize` is an argument of the renderer"),
        ("thinking", r"row 0: column `chat_template_kwargs` must be a mapping .*got 'thinking'"),
    ]:
        with pytest.raises(ValueError, match=f"data.train: {said}"):
            source(tmp_path, [{"prompt": QUESTION, "chat_template_kwargs": value}], chat_template=QWEN35)


@pytest.mark.parametrize(
    ("template", "names", "said"),
    [
        (
            QWEN3,
            {"enable_thinkin": 1},
            "does not use `enable_thinkin`; did you mean `enable_thinking`?; correct the name, or leave it out",
        ),
        (QWEN3, {"effort": 1}, "does not use `effort`; it uses enable_thinking; correct the name, or leave it out"),
        (CHATML, {"enable_thinking": 1}, "does not use `enable_thinking`; correct the name, or leave it out"),
        (
            "{% set thinking = true %}{{ thinking }}",
            {"thinking": 1},
            "does not use `thinking`; correct the name, or leave it out",
        ),
        (None, {"thinking": 1}, "thinking needs a chat template; set data.chat_template to Jinja text or a file"),
        ("none", {"thinking": 1}, "thinking needs a chat template; set data.chat_template to Jinja text or a file"),
        (
            QWEN3,
            {"messages": 1},
            "`messages` is an argument of the renderer, not a variable of the template; leave it out",
        ),
    ],
)
def test_a_variable_without_effect_is_refused_by_name(template, names, said):
    with pytest.raises(ValueError, match=r"^data.chat_template_kwargs: ") as caught:
        check_kwargs(names, template)
    assert str(caught.value).endswith(said)


def test_a_run_is_refused_that_sets_a_variable_without_effect(chat_folder, tmp_path):  # noqa: F811
    config = run_config(tmp_path, chat_template_kwargs={"enable_thinking": False})
    with pytest.raises(
        ValueError, match=r"data.chat_template_kwargs: the chat template does not use `enable_thinking`"
    ):
        tokenizer_of(config, chat_folder)
    assert tokenizer_of(
        run_config(tmp_path, chat_template=QWEN3, chat_template_kwargs={"enable_thinking": False}), chat_folder
    )


def test_variables_are_found_wherever_a_template_uses_them():
    assert variables(GPT_OSS) == {"reasoning_effort", "messages"} and "thinking" in variables(DEEPSEEK_V31)
    assert variables("{% generation %}{{ a }}{%- endgeneration -%}{% for m in b %}{% break %}{% endfor %}") == {
        "a",
        "b",
    }
    assert variables("{% macro f() %}{{ c if namespace(d=1).d }}{% endmacro %}{{ f() }}") == {"c"}
    assert variables("{% for") is None  # rendering reports it


def test_hostile_prompts_are_searched_in_linear_time():
    """With a quadratic search each of them takes minutes."""
    for text in ("<" * 10**5, "<think" * 10**5, "<" + "think" * 10**5, "<think>" * 10**4 + "x", "\n" * 10**5):
        assert opened_thought("a", prefill=text + "</think>") in ("", "<think></think>")
        assert opened_thought(text) == ""


def test_special_tokens_among_the_stop_strings_are_end_tokens(chat_folder):  # noqa: F811
    config = run_config(chat_folder)
    stop = ["<|im_start|>", "</answer>"]

    def loaded(stop):
        return tokenizer_of(
            config.model_copy(update={"rollout": config.rollout.model_copy(update={"stop": stop})}), chat_folder
        )

    assert loaded([]).eos_token_ids == (0, 2, 3) and loaded(stop).eos_token_ids == (0, 1, 2, 3)
    with pytest.raises(
        ValueError,
        match=r"rollout.stop.1: '<\|im_end\|>\\n' contains the special token <\|im_end\|>, .*name the token alone",
    ):
        loaded(["x", "<|im_end|>\n"])


@for_each(
    ("template", "keys", "said"),
    [
        (
            CHATML,
            {},
            "rollout.max_thinking_tokens: the model's tokenizer and chat template have no tags of a thought, such as",
        ),
        (QWEN3, {"thinking_end": "Stop."}, "rollout.thinking_end: 'Stop.' has no </think>, which closes this model's"),
        (COMMAND_A, {"thinking_end": "</think>"}, "'</think>' has no <|END_THINKING|>"),
        (QWEN3, {"thinking_end": "</think><|im_end|>"}, "has the end token <|im_end|>, which ends responses"),
        (QWEN3, {"max_completion_length": 41}, "of '</think>' leave no room for an answer in rollout.max_completion"),
    ],
)
def test_a_budget_of_thoughts_needs_tags_that_it_can_close(template, keys, said, chat_folder, tmp_path):  # noqa: F811
    config = run_config(tmp_path, {"max_thinking_tokens": 40} | keys, chat_template=template)
    with pytest.raises(ValueError) as error:
        tokenizer_of(config, chat_folder)
    assert said in str(error.value)


@for_each(
    ("template", "end", "tags"),
    [
        (QWEN3, "", ("<think>", "</think>")),
        (QWEN3_THINKING, "I stop.</think>\n", ("<think>", "</think>")),
        (COMMAND_A, "", ("<|START_THINKING|>", "<|END_THINKING|>")),
        ("none", "", ("<think>", "</think>")),
    ],
)
def test_a_budget_ends_thoughts_with_the_tags_of_the_template(template, end, tags, chat_folder, tmp_path):  # noqa: F811
    said = {"system_prompt": "Think between <think> and </think>."} if template == "none" else {}
    config = run_config(tmp_path, {"max_thinking_tokens": 40, "thinking_end": end}, chat_template=template, **said)
    tokenizer = tokenizer_of(config, chat_folder)
    thinking = sampling_of(config.rollout, tokenizer).thinking
    assert (thinking.max_tokens, thinking.opening, thinking.closing) == (40, *tags)
    assert tokenizer.decode(thinking.end_ids, special=True) == (end or tags[1])
    assert sampling_of(run_config(tmp_path).rollout, tokenizer_of(run_config(tmp_path), chat_folder)).thinking is None


TALK = [("user", "one?"), ("assistant", "1"), ("user", "two?"), ("assistant", "<think>2</think>2")]
WITHOUT_OLD_THOUGHTS = (
    (  # as Qwen3's: only a last message keeps its thought, and an empty one without any
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last and '<think>' not in "
        "m.content %}<think></think>{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    )
    + HEADER
    + "{% endif %}"
)
NEXT_ENDS = (  # as GLM's: the token of the next message ends the one before
    "{% for m in messages %}{{ '<|im_start|>' if m.role == 'assistant' else '<|eot|>' }}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)
WITHOUT_ENDS = WITHOUT_OLD_THOUGHTS.replace("<|im_end|>", "|")


@for_each(
    ("template", "first", "written"),
    [
        (TURNS + HEADER + "{% endif %}", 0, ["1<|im_end|>", "<think>2</think>2<|im_end|>"]),
        (TURNS + HEADER + "{% endif %}", 2, ["<think>2</think>2<|im_end|>"]),
        (WITHOUT_OLD_THOUGHTS, 0, ["1<|im_end|>", "<think>2</think>2<|im_end|>"]),
        (LLAMA_2.replace("[INST] {{ m.content }} [/INST]", "{{ m.role }}: {{ m.content }};"), 0, None),
        (
            "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
            0,
            ["assistant: 1\n", "assistant: <think>"],
        ),
        (NEXT_ENDS, 0, ["1<|eot|>", "<think>2</think>2"]),
        (R1, 0, "message 1 of the assistant does not begin where its prompt ends"),
        (WITHOUT_ENDS, 0, "an earlier message of the assistant is rendered otherwise"),
        ("none", 0, "chat messages need a chat template"),
    ],
)
def test_the_assistants_tokens_are_found_in_any_template(chat_folder, template, first, written):  # noqa: F811
    tokenizer = load_tokenizer(chat_folder)
    messages = [{"role": role, "content": text} for role, text in TALK]
    if isinstance(written, str):
        with pytest.raises(ValueError, match=written):
            masked_chat(tokenizer, messages, first, template)
        return
    ids, mask = masked_chat(tokenizer, messages, first, template)
    assert ids == tokenizer.encode(tokenizer.apply_template(messages, template, "closed"), add_special_tokens=False)
    parts, last = [], False
    for token, counts in zip(ids, mask, strict=True):
        if counts:
            parts[len(parts) - last :] = [[*(parts[-1] if last else []), token]]
        last = counts
    texts = [tokenizer.decode(part, special=True) for part in parts]
    assert len(texts) == len(written or TALK[1::2])
    assert all(text.startswith(start) for text, start in zip(texts, written or texts, strict=True))


def test_a_text_response_ends_with_an_end_token(base_folder):  # noqa: F811
    tokenizer = load_tokenizer(base_folder)
    ids, mask = masked_text(tokenizer, "one?", " 1")
    assert tokenizer.decode([token for token, counts in zip(ids, mask, strict=True) if counts]) == " 1"
    assert mask[-1] and ids[-1] in tokenizer.eos_token_ids
