"""A model whose code in vLLM imports torchvision is refused before the start where torchvision is missing."""

import json

import pytest

from megagrpo.config import RolloutSection
from megagrpo.engine.servers import serving
from megagrpo.models.families import FAMILIES


def test_qwen3_5_without_torchvision_is_refused_with_the_command_that_installs_it(tmp_path, monkeypatch):
    monkeypatch.setattr(serving, "find_spec", lambda name: None)
    for kind, missing in (("qwen3_5_text", True), ("qwen3_5_moe_text", True), ("qwen3_next", False)):
        (tmp_path / "config.json").write_text(json.dumps(FAMILIES[kind].example.release))
        arguments = (RolloutSection(), tmp_path, "bfloat16", True, None)
        if missing:
            with pytest.raises(ValueError, match=r'torchvision, which is missing; run `pip install --no-deps "torch'):
                serving._check_place(*arguments)
        else:
            serving._check_place(*arguments)
