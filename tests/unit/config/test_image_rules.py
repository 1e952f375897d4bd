"""Each rule of `data.images` names both keys and the reason, and is silent without images."""

import pytest

from megagrpo.config import ConfigError, load_config

ON = "data.images=true"
REFUSED = [  # overrides, and the beginning of the problem
    (["multi_turn.agent=/file.py:Agent"], "multi_turn.agent: with data.images, agents send text only"),
    (["train.overlap=[experts]"], "train.overlap: with data.images, its schedule runs two micro-batches at once"),
    (["data.chat_template=none"], "data.chat_template: with data.images, only a template places images"),
    (["data.overlong_prompts=truncate_left"], "data.overlong_prompts: with data.images, a truncated prompt would lose"),
]


@pytest.mark.parametrize(("overrides", "said"), REFUSED)
def test_a_rule_names_the_key_and_the_reason(overrides, said):
    with pytest.raises(ConfigError) as error:
        load_config("megagrpo:quickstart", [ON, *overrides])
    assert any(line.strip().startswith(said) for line in str(error.value).splitlines()), str(error.value)
    try:
        load_config("megagrpo:quickstart", overrides)
    except ConfigError as other:  # for another reason
        assert "data.images" not in str(other)


def test_images_alone_are_allowed():
    assert load_config("megagrpo:quickstart", [ON, "parallel.tp=3"]).data.images
