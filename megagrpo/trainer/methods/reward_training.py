"""Reward models: a scalar score of a conversation, learnt from pairs of responses by the Bradley-Terry loss.

The score is the scalar head's number at the last token. The folder that a run leaves has the head as `score.weight`.
"""

from __future__ import annotations

import json
from collections.abc import Set
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from megagrpo.algorithms.preference_losses import make_score_loss
from megagrpo.config import RunConfig
from megagrpo.data.examples import SCORED_PAIRS, ExampleSource
from megagrpo.families.hf_config import HfConfig
from megagrpo.families.weight_sources import INDEX, SINGLE
from megagrpo.platform.parallel.agree import on_first_rank
from megagrpo.policy.layers.scalar_head import SCORE, SCORE_FILE
from megagrpo.policy.scalar_model import ScalarModel
from megagrpo.trainer.methods.row_wiring import Method
from megagrpo.trainer.run_inputs import Data
from megagrpo.weights.bridge.load import embedding_and_head

RENAMED = "backbone.safetensors"


def method(config: RunConfig) -> Method:
    """Return what this method differs in."""
    return Method(make_score_loss, SCORED_PAIRS, ScalarModel, start, write_score)


def start(policy: ScalarModel, data: Data) -> None:
    """Draw the head's weight, as transformers does. Collective. Raises ValueError for a model without a class that
    transformers loads."""
    on_first_rank(policy.layout, lambda: classifier_of(policy.hf_config))
    generator = torch.Generator().manual_seed(policy.config.run.seed)
    spread = float(policy.hf_config.raw.get("initializer_range", 0.02))
    policy.fill_head(torch.randn(policy.hf_config.hidden_size, generator=generator) * spread)


def classifier_of(hf_config: HfConfig) -> str:
    """Return transformers' class of a reward model with this architecture. Raises ValueError if it has none."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as KNOWN

    kind = str(hf_config.raw.get("model_type"))
    if kind not in KNOWN:
        raise ValueError(f"model.path: transformers has no sequence classification for model_type {kind}")
    return KNOWN[kind]


def write_score(policy: ScalarModel, folder: Path, data: Data) -> None:
    """Turn a trained model's folder into one that `AutoModelForSequenceClassification` loads. Collective."""
    head = policy.head_weight().to(policy.dtype)[None]
    sources = [one for one in (data.prompts, *data.held_rows.values()) if isinstance(one, ExampleSource)]
    ends = set[int]().union(*(source.last_tokens for source in sources))
    on_first_rank(policy.layout, lambda: _write_score(head, policy.hf_config, folder, ends))


def _write_score(head: torch.Tensor, hf_config: HfConfig, folder: Path, ends: Set[int]) -> None:
    """Write the head, and as padding a token that ends no conversation (`ends`): transformers skips it to find the last
    token."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    known = [] if tokenizer.pad_token_id is None else [tokenizer.pad_token_id]
    count = min(len(tokenizer), hf_config.vocab_size)
    padding = next(token for token in (*known, *reversed(range(count))) if token not in ends)
    index = folder / INDEX
    if index.exists():
        where = json.loads(index.read_text())["weight_map"]
    else:
        (folder / SINGLE).rename(folder / RENAMED)
        with safe_open(folder / RENAMED, "pt") as file:
            where = dict.fromkeys(file.keys(), RENAMED)
    save_file({SCORE: head}, folder / SCORE_FILE, {"format": "pt"})
    where |= {SCORE: SCORE_FILE}
    where.pop(embedding_and_head(hf_config)[1], None)
    index.write_text(json.dumps({"metadata": {}, "weight_map": where}, indent=2))
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": [classifier_of(hf_config)], "num_labels": 1, "pad_token_id": padding}
    config |= {"id2label": {"0": "score"}, "label2id": {"score": 0}}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(padding)
    tokenizer.save_pretrained(folder)
