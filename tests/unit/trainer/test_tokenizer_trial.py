"""`check` ends with an error when a template or a tokenizer would run for ever or take all memory."""

import pytest
from tokenizers import Regex
from tokenizers.normalizers import Replace, Sequence

from megagrpo.config.io import validated
from megagrpo.trainer import dry_run
from megagrpo.trainer.dry_run import try_tokenizer
from tests.unit.data.test_prompts import tokenizer  # noqa: F401 (a fixture)
from tests.unit.for_each import for_each

LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% set x = i * j %}{% endfor %}{% endfor %}"
GROWS = "{% set n = namespace(x='x' * 1000) %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}"
AT_ONCE = "{{ 'x' * 10 ** 12 }}"
PLAIN = "{{ messages[0]['content'] }}"


def config(template):
    sections = dict(model={"path": "m"}, rewards={"functions": [{"function": "exact_number"}]})
    return validated(sections | dict(data={"train": {"source": "a.jsonl"}, "chat_template": template}), (), "test")


@for_each(
    ("template", "normalizer", "said"),
    [
        (LOOPS, None, "did not finish a prompt of 100 characters in 2 s"),
        (GROWS, None, "needs more than 0.25 GiB of memory"),
        (AT_ONCE, None, "needs more than 0.25 GiB of memory"),
        (PLAIN, Sequence([Replace(Regex("."), "x" * 1000)] * 4), "(needs more than 0.25 GiB|did not finish)"),
        (PLAIN, None, None),
        ("{{ raise_exception('odd') }}", None, None),  # the first row shows it
    ],
)
def test_a_tokenizer_that_never_ends_or_takes_all_memory_is_named(template, normalizer, said, tokenizer, monkeypatch):  # noqa: F811
    monkeypatch.setattr(dry_run, "RENDER_SECONDS", 2)
    monkeypatch.setattr(dry_run, "RENDER_MEMORY", 2**28)
    tokenizer.render("warm")  # imports outside of the limits
    own = tokenizer.tokenizer.backend_tokenizer
    own.normalizer = normalizer
    try:
        if said is None:
            try_tokenizer(config(template), tokenizer)
        else:
            with pytest.raises(ValueError, match=f"model.path: the chat template .* of m {said}"):
                try_tokenizer(config(template), tokenizer)
    finally:
        own.normalizer = None
