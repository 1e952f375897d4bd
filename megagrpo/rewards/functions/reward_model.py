"""A Hugging Face sequence-classification model with one label as a reward, in a separate worker process."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import batched
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from megagrpo.rewards.functions.text_rewards import encodable, text_of


@dataclass(eq=False)
class RewardModel:
    """Returns the model's logit for each prompt with its completion (the definition of TRL's reward models).

    Messages are formatted with the chat template of the model's own tokenizer. A plain-text prompt and its completion
    are concatenated, or with `as_chat` turned into a user and an assistant message. No special tokens are added,
    padding is on the right, and texts are truncated to `max_length` tokens. `device` is `cpu`, or a GPU such as
    `cuda:0` with free memory beside the trainer and vLLM.
    """

    path: str
    tokenizer: str | None = None
    batch_size: int = 8
    max_length: int | None = None
    as_chat: bool = False
    device: str = "cpu"
    dtype: str = "float32"
    threads: int = 1

    def __post_init__(self) -> None:
        path = self.path
        if self.dtype not in ("float32", "bfloat16", "float16"):
            raise ValueError(f"model:{path}: dtype {self.dtype!r} must be float32, bfloat16 or float16")
        if self.batch_size < 1:
            raise ValueError(f"model:{path}: batch_size {self.batch_size} must be 1 or more")
        torch.set_num_threads(self.threads)
        self._tokenizer = AutoTokenizer.from_pretrained(self.tokenizer or path, trust_remote_code=False)
        model, report = AutoModelForSequenceClassification.from_pretrained(
            path, dtype=getattr(torch, self.dtype), output_loading_info=True, trust_remote_code=False
        )
        if model.config.num_labels != 1:
            raise ValueError(
                f"model:{path}: it has {model.config.num_labels} labels; a reward model has one (num_labels 1)"
            )
        if report["missing_keys"]:
            raise ValueError(
                f"model:{path}: not a reward model: its weights lack {', '.join(sorted(report['missing_keys']))}"
            )
        if self._tokenizer.pad_token is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        model.config.pad_token_id = self._tokenizer.pad_token_id
        self._model = model.to(self.device).eval()

    @torch.inference_mode()
    def __call__(self, prompts: list[Any], completions: list[Any]) -> list[float]:
        texts = [self._text(p, c) for p, c in zip(prompts, completions, strict=True)]
        rewards = [0.0] * len(texts)
        # sorted, because a batch is padded to its longest text
        by_length = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        for indices in batched(by_length, self.batch_size):
            inputs = self._tokenizer(
                [texts[i] for i in indices],
                add_special_tokens=False,
                padding=True,
                padding_side="right",
                truncation=self.max_length is not None,
                max_length=self.max_length,
                return_tensors="pt",
            ).to(self.device)
            for i, reward in zip(indices, self._model(**inputs).logits[:, 0].float().tolist(), strict=True):
                rewards[i] = reward
        return rewards

    def _text(self, prompt: str | list[Any], completion: str | list[Any]) -> str:
        if isinstance(prompt, str) and not self.as_chat:
            return encodable(prompt + text_of(completion))
        asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        answered = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
        return encodable(self._tokenizer.apply_chat_template([*asked, *answered], tokenize=False))
