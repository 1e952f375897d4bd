"""Text models inside multimodal models: what config.json of the whole model says about them, and their names of tensors
there. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from megagrpo.families.shared.precisions import QUANTIZATION
from megagrpo.families.shared.precisions import TEXT_CONFIG as TEXT_CONFIG
from megagrpo.families.shared.vision import ROTARY, Vision, one_axis

Raw = dict[str, Any]  # config.json as read
# Keys of the whole model that change nothing without images, sounds and videos. In a file without `text_config` they
# are between the keys of the text model.
MULTIMODAL = frozenset(
    "text_config vision_config audio_config image_token_id image_token_index video_token_id video_token_index "
    "image_start_token_id image_end_token_id video_start_token_id video_end_token_id "
    "audio_token_id vision_start_token_id vision_end_token_id vision_token_id boi_token_index eoi_token_index "
    "boi_token_id eoi_token_id boa_token_id eoa_token_id eoa_token_index mm_tokens_per_image "
    "vision_soft_tokens_per_image multimodal_projector_bias projector_hidden_act spatial_merge_size "
    "vision_feature_layer vision_feature_select_strategy".split()
)
_DTYPE = ("dtype", "torch_dtype")
_TIES = "tie_word_embeddings"
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Keys of the whole model that count for its text model.
OUTER = (*_DTYPE, *_TOKENS, QUANTIZATION, _TIES)
THINKER = "thinker_config"  # key of a model that speaks: the multimodal model that writes its texts
_TOWERS = "vision_tower|vision_model|visual|multi_modal_projector|audio_tower|embed_vision|embed_audio"


def thinker_of(raw: Raw) -> Raw:
    """Return config.json of a model that speaks with the keys of its thinker beside its own; others as they are."""
    if not isinstance(thinker := raw.get(THINKER), dict):
        return raw
    return thinker | {key: value for key, value in raw.items() if key not in (THINKER, _TIES)}


@dataclass(frozen=True)
class Naming:
    """Names of a text model's tensors or modules: `decoder` in place of "model.", and `head` before "lm_head."."""

    decoder: str = "model."
    head: str = ""

    def of(self, name: str) -> str:
        """Return the name for `name`, a name of the text model alone."""
        if name.startswith("model."):
            return self.decoder + name.removeprefix("model.")
        return self.head + name if name.startswith("lm_head.") else name

    def alone(self, name: str) -> str:
        """Return the name in the text model alone; other names are returned unchanged."""
        if name.startswith(self.decoder):
            return "model." + name.removeprefix(self.decoder)
        return name.removeprefix(self.head) if name.startswith(f"{self.head}lm_head.") else name


# Of files: before transformers 4.52, since then, of Idefics, of Qwen-Omni, and of models whose text model was the whole
# model once.
NAMINGS = (
    Naming("language_model.model.", "language_model."),
    Naming("model.language_model."),
    Naming("model.text_model."),
    Naming("thinker.model.", "thinker."),
    Naming(),
)
MODULE_NAMES = Naming("model.language_model.")  # of transformers' modules, which adapters name


@dataclass(frozen=True)
class Wrapper:
    """A multimodal model of transformers around the text model of a family, which lists it in `Family.wrappers`.

    - `model_type` and `architecture` are those of the whole model.
    - `prefix` begins the decoder's tensors in the published files. Files with another of `NAMINGS` load too.
    - `texts` are the values of `model_type` in `text_config`; (): the family's own.
    - `defaults` are keys of the text model that published files leave out, with the values of transformers' class.
    - `required` are keys of the text model, or of its rotation, for which vLLM has no default or another one than
      transformers.
    - `problems` returns why the model with this config.json cannot be trained, besides the text model's reasons.
    - `ignored` are further keys, of the whole model or `text_config`, that change nothing without images, sounds and
      videos.
    - `text_ties`: `tie_word_embeddings` in `text_config` counts, and a false one outside changes nothing.
    - `modules` names transformers' modules of the decoder and the head, which adapters name.
    - `untrained` are regular expressions of tensors outside the text model, besides the usual names of towers.
    - `vision` reads the tower for images from config.json; None: the model is trained on text only.
    - `classes` are other names in `architectures` of releases, which vLLM maps to the same class.
    """

    model_type: str
    architecture: str
    prefix: str = "language_model.model."
    texts: tuple[str, ...] = ()
    defaults: Raw = field(default_factory=dict)
    required: tuple[str, ...] = ()
    problems: Callable[[Raw], list[str]] = lambda raw: []
    ignored: tuple[str, ...] = ()
    text_ties: bool = False
    untrained: tuple[str, ...] = ()
    modules: Naming = MODULE_NAMES
    vision: Callable[[Raw], Vision | None] | None = None
    classes: tuple[str, ...] = ()

    def text_of(self, raw: Raw) -> Raw:
        """Return the keys of the text model, without `model_type` and `architectures`. Those of the whole model in
        `OUTER` replace them, as in transformers."""
        inner = raw.get(TEXT_CONFIG)
        if inner is None:
            inner = {key: value for key, value in raw.items() if key not in MULTIMODAL}
        outer = {key: raw[key] for key in OUTER if raw.get(key) is not None}
        if self.text_ties and not outer.get(_TIES):
            outer.pop(_TIES, None)
        names = {"model_type", "architectures", "auto_map", *(_DTYPE if outer.keys() & {*_DTYPE} else ())}
        names |= {*self.ignored}
        return self.defaults | {key: value for key, value in one_axis(inner).items() if key not in names} | outer

    def missing(self, text: Raw) -> list[str]:
        """Return the `required` keys that the text model lacks."""
        parameters = [text[key] for key in ROTARY if isinstance(text.get(key), dict)]
        return [key for key in self.required if all(key not in keys for keys in (text, *parameters))]

    def conflicts(self, raw: Raw) -> list[str]:
        """Return the keys whose values in `text_config` and outside contradict each other, which transformers and vLLM
        read in different places."""
        outer, inner = raw.get(_TIES), (raw.get(TEXT_CONFIG) or {}).get(_TIES, self.defaults.get(_TIES))
        if None in (outer, inner) or outer == inner or (self.text_ties and inner):
            return []
        return [_TIES]

    def naming(self, names: Iterable[str]) -> Naming:
        """Return the naming of files that hold the tensors `names`; of the published ones if none is of a decoder."""
        for name in names:
            for naming in NAMINGS[:-1]:
                if name.startswith(naming.decoder):
                    return naming
        return next(naming for naming in NAMINGS if naming.decoder == self.prefix)

    @property
    def patterns(self) -> tuple[str, ...]:
        """Regular expressions of the tensors outside the text model."""
        return (rf"(model\.)?({_TOWERS})\..+", *self.untrained)
