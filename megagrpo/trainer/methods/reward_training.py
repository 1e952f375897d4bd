"""Reward models: a scalar score of a conversation, learnt from pairs of responses by the Bradley-Terry loss.

The score is the product of the last token's hidden state with one row of the LM head, of a token that no row of the
data has. So it loads, trains and resumes in every layout as the LM head does. The folder that a run leaves has this row
as `score.weight`, and its token as padding, which transformers skips to find the last token.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

from megagrpo.algorithms.preference_losses import make_score_loss
from megagrpo.config import RunConfig
from megagrpo.data.examples import SCORED_PAIRS, ExampleSource
from megagrpo.families.hf_config import HfConfig
from megagrpo.families.weight_sources import INDEX, SINGLE
from megagrpo.platform.parallel.agree import on_first_rank
from megagrpo.platform.parallel.layout import Layout
from megagrpo.policy.megatron_policy import MegatronPolicy
from megagrpo.trainer.methods.row_loop import RowLoop
from megagrpo.trainer.methods.row_wiring import Method, build_rows
from megagrpo.trainer.run_inputs import Data
from megagrpo.weights.bridge.load import embedding_and_head

SCORE_FILE, RENAMED = "score.safetensors", "backbone.safetensors"


def build(config: RunConfig, base_folder: Path, layout: Layout, resources: ExitStack) -> RowLoop:
    """Build the training loop; see `build_rows`."""
    method = Method(make_score_loss, SCORED_PAIRS, choose_row, write_score)
    return build_rows(method, config, base_folder, layout, resources)


def choose_row(policy: MegatronPolicy, data: Data) -> None:
    """Give the policy the row of the last token that no row of the data has. Collective. Raises ValueError for a model
    without a class that transformers loads, and for data with all tokens."""

    def chosen() -> int:
        classifier_of(policy.hf_config)
        sources = [one for one in (data.prompts, *data.held_rows.values()) if isinstance(one, ExampleSource)]
        used = set[int]().union(*(source.used for source in sources))
        count = min(len(data.tokenizer or ()), policy.hf_config.vocab_size)
        free = (token for token in reversed(range(count)) if token not in used)
        if (row := next(free, None)) is None:
            raise ValueError("data.train: the rows have all tokens of the model, and a score needs one that none has")
        return row

    policy.score_row = on_first_rank(policy.layout, chosen)


def classifier_of(hf_config: HfConfig) -> str:
    """Return transformers' class of a reward model with this architecture. Raises ValueError if it has none."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as KNOWN

    kind = str(hf_config.raw.get("model_type"))
    if kind not in KNOWN:
        raise ValueError(f"model.path: transformers has no sequence classification for model_type {kind}")
    return KNOWN[kind]


def write_score(policy: MegatronPolicy, folder: Path) -> None:
    """Turn a trained model's folder into one that `AutoModelForSequenceClassification` loads, on one rank."""
    names, index, row = embedding_and_head(policy.hf_config), folder / INDEX, policy.score_row
    assert row is not None, "`choose_row` was called"
    name = names[0] if policy.hf_config.tied_embeddings else names[1]
    if index.exists():
        where = json.loads(index.read_text())["weight_map"]
    else:
        (folder / SINGLE).rename(folder / RENAMED)
        with safe_open(folder / RENAMED, "pt") as file:
            where = dict.fromkeys(file.keys(), RENAMED)
    with safe_open(folder / where[name], "pt") as file:
        save_file({"score.weight": file.get_slice(name)[row : row + 1]}, folder / SCORE_FILE, {"format": "pt"})
    where |= {"score.weight": SCORE_FILE}
    where.pop(names[1], None)
    index.write_text(json.dumps({"metadata": {}, "weight_map": where}, indent=2))
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": [classifier_of(policy.hf_config)], "num_labels": 1, "pad_token_id": row}
    config |= {"id2label": {"0": "score"}, "label2id": {"score": 0}}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(row)
    tokenizer.save_pretrained(folder)
