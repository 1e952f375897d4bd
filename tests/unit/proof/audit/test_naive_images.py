"""The audit's images: transformers' own processor and model give the log-probs of the dumped files."""

from pathlib import Path

import pytest
import torch

from megagrpo.config import ConfigError
from megagrpo.data.tokens.tokenizer import load_tokenizer
from megagrpo.families.hf_config import load_hf_config
from megagrpo.proof.audit import naive
from megagrpo.proof.audit.naive import freeze_tower, image_inputs
from megagrpo.proof.audit.saved import Sample
from megagrpo.types import SamplingParams
from megagrpo.weights.bridge.image_facts import image_reader
from tests.distributed.tiny_vision import KINDS, full_logits, image, is_text, write_model


def sample_of(folder: Path, response: list[int], out: Path) -> tuple[Sample, dict]:
    """A response to a question about two images, with the images' files, and the trainer's inputs."""
    tokenizer, pictures = load_tokenizer(folder), [image(84, 56, 1), image(30, 100, 2)]
    reader = image_reader(folder, load_hf_config(folder), tokenizer)
    messages, found = reader.question([dict(role="user", content="same?")], {"images": pictures})
    prompt, inputs = reader.placed(tokenizer.render(messages, expand=reader.expanded), found)
    files = []
    for number, content in enumerate(inputs.files()):
        files.append(out / f"{number}")
        files[-1].write_bytes(content)
    ids = torch.tensor([*prompt, *response])
    places = torch.arange(len(prompt), len(ids))
    return Sample(ids, len(prompt), torch.zeros(len(ids)), places, {}, images=tuple(files)), inputs


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "gemma3"])
def test_log_probs_of_a_dumped_sample_are_those_of_the_trainers_inputs(kind, tmp_path):
    write_model(tmp_path / "model", kind=kind, **KINDS[kind].served)
    sample, inputs = sample_of(tmp_path / "model", [3, 1, 4, 1, 5], tmp_path)
    model = naive.load_model(tmp_path / "model", "float32")
    freeze_tower(model)
    images = image_inputs(tmp_path / "model", model, sample)
    mine = naive.log_softmax(model, sample.token_ids, sample.places, SamplingParams(1.0, 8), images=images)
    (logits,) = full_logits(tmp_path / "model", [(sample.token_ids.tolist(), inputs)])
    expected = logits[sample.places - 1].log_softmax(-1)
    torch.testing.assert_close(mine.detach().float(), expected, atol=1e-5, rtol=0)
    mine.sum().backward()
    trained = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert trained == {name for name, _ in model.named_parameters() if is_text(name)}
    sample.images[0].write_bytes(sample.images[1].read_bytes())
    changed = image_inputs(tmp_path / "model", model, sample)
    if kind == "gemma3":  # each image has as many tokens
        other = naive.log_softmax(model, sample.token_ids, sample.places, SamplingParams(1.0, 8), images=changed)
        assert (other - mine).abs().max() > 1e-3
        return
    with pytest.raises(ValueError, match="tokens"):
        model(sample.token_ids[None], **changed)


def test_a_response_with_the_image_token_is_refused(tmp_path):
    write_model(tmp_path / "model")
    token = load_hf_config(tmp_path / "model").vision.image_token
    sample, _ = sample_of(tmp_path / "model", [3, token], tmp_path)
    model = naive.load_model(tmp_path / "model", "float32")
    with pytest.raises(ConfigError, match="--step: a response holds an image token"):
        image_inputs(tmp_path / "model", model, sample)
    text = Sample(sample.token_ids, sample.prompt_length, sample.rollout_logprobs, sample.places, {})
    assert image_inputs(tmp_path / "model", model, text) == {}
