"""After the first update, updates replay the loaders' copies without the loaders, through vLLM's reload of a small
model."""

import importlib

import pytest
import torch
from torch import nn

from megagrpo.families.shared.boxes import extent, whole
from megagrpo.sync.vllm_side.reader import ShardReader
from megagrpo.sync.vllm_side.receiver import BlockSource
from megagrpo.weights.slices.tensor_index import SharedBlock, SharedTensor, TensorIndex


def vllm_loader(name):
    """A module of vLLM's loaders, imported by the tests only: each process of pytest-xdist collects this file."""
    return importlib.import_module(f"vllm.model_executor.model_loader.{name}")


def loading_module():
    return importlib.import_module("megagrpo.sync.vllm_side.loading")


class Memory(BlockSource):
    """Tensors of this process as the blocks of one rank."""

    def __init__(self, tensors, index):
        super().__init__(index)
        self.tensors = tensors

    def values(self, name, index, part):
        self.bytes += 4 * extent(part)[0]
        return self.tensors[name][tuple(slice(a, b) for a, b in zip(*part, strict=True))]


class Gated(nn.Module):
    """A model with two projections in one parameter like vLLM's merged linears, columns of a third, and a bias, which
    no reload moves aside. Loaders call their destination `param`, by which vLLM finds it."""

    def __init__(self):
        super().__init__()
        self.weight, self.down = nn.Parameter(torch.zeros(8, 6)), nn.Parameter(torch.zeros(6, 4))
        self.bias = nn.Parameter(torch.zeros(8))
        self.weight.weight_loader = self.load_part
        self.down.weight_loader = lambda param, loaded: param.data.copy_(loaded.narrow(1, 4, 4))
        self.bias.weight_loader = vllm_loader("weight_utils").default_weight_loader

    def load_part(self, param, loaded, part):
        param.data.narrow(0, 4 * part, 4).copy_(loaded)


class Padded(nn.Module):
    """An embedding with rows without a token."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 6))
        self.weight.weight_loader = self.load

    def load(self, param, loaded):
        param[:5].data.copy_(loaded)
        param[5:].data.fill_(0)


class Model(nn.Module):
    def __init__(self, norm_loader=None):
        super().__init__()
        norm_loader = norm_loader or vllm_loader("weight_utils").default_weight_loader
        self.embed, self.mlp, self.norm = Padded(), Gated(), nn.LayerNorm(6, bias=False)
        self.norm.weight.weight_loader = norm_loader
        self.runs = 0

    def load_weights(self, weights):
        self.runs += 1
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            if name in ("gate", "up"):
                self.mlp.weight.weight_loader(self.mlp.weight, tensor, ("gate", "up").index(name))
                yield "mlp.weight"
            else:
                parameters[name].weight_loader(parameters[name], tensor)
                yield name


SHAPES = {"embed.weight": (5, 6), "gate": (4, 6), "up": (4, 6), "mlp.down": (6, 8), "mlp.bias": (8,)} | {
    "norm.weight": (6,)
}


def tensors(seed, shapes=SHAPES):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def tensor_index(given, version):
    listed = {
        name: SharedTensor(tuple(t.shape), (SharedBlock(0, "", 0, whole(tuple(t.shape)), 0),))
        for name, t in given.items()
    }
    return TensorIndex(version, "float32", listed)


def update(loading, given, version):
    """Apply one update as a worker does; return the tensors that were read."""
    reader = ShardReader(Memory(given, tensor_index(given, version)))
    vllm_loader("reload").initialize_layerwise_reload(loading.model)
    loading.load(reader)
    vllm_loader("reload").finalize_layerwise_reload(loading.model, None)
    return reader


@pytest.fixture(autouse=True)
def padded_rows_are_allowed(monkeypatch):
    monkeypatch.setattr(loading_module(), "VocabParallelEmbedding", Padded)


def loading_of(model):
    with torch.device("cpu"):
        vllm_loader("reload").record_metadata_for_reloading(model)
    return loading_module().Loading(model, None)


def parameters(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def expected(given):
    return {
        "embed.weight": torch.cat([given["embed.weight"], torch.zeros(3, 6)]),
        "mlp.weight": torch.cat([given["gate"], given["up"]]),
        "mlp.down": given["mlp.down"][:, 4:],
        "mlp.bias": given["mlp.bias"],
        "norm.weight": given["norm.weight"],
    }


def test_later_updates_copy_what_the_loaders_copied_without_running_them():
    model = Model()
    loading, places = loading_of(model), {name: p.data_ptr() for name, p in model.named_parameters()}
    readers = [update(loading, tensors(version), version) for version in (1, 2, 3)]
    assert model.runs == 1
    torch.testing.assert_close(parameters(model), expected(tensors(3)), rtol=0, atol=0)
    # captured CUDA graphs hold these addresses
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == places
    assert {key[0] for key in readers[1].reads} == set(SHAPES) and readers[1].reads.keys() == readers[0].reads.keys()


def test_a_dry_run_says_how_often_a_replay_fetches_each_box():
    model = Model()
    loading, given = loading_of(model), tensors(1)
    vllm_loader("reload").initialize_layerwise_reload(model)
    told = loading.dry_run(tensor_index(given, 1))
    vllm_loader("reload").finalize_layerwise_reload(model, None)
    assert update(loading, given, 1).fetched == told and model.runs == 1
    torch.testing.assert_close(parameters(model), expected(given), rtol=0, atol=0)


def test_a_loader_that_computes_runs_at_every_update(caplog):
    loaders = vllm_loader("weight_utils")
    model = Model(loaders.composed_weight_loader(loaders.default_weight_loader, lambda values: -values.exp()))
    loading = loading_of(model)
    with caplog.at_level("INFO"):
        for version in (1, 2):
            update(loading, tensors(version), version)
    assert model.runs == 2 and caplog.text.count("LayerNorm.weight is changed by aten.copy_.default") == 1
    wanted = expected(tensors(2))
    torch.testing.assert_close(
        parameters(model), wanted | {"norm.weight": -wanted["norm.weight"].exp()}, rtol=0, atol=0
    )


def test_tensors_of_other_shapes_are_recorded_again():
    model = Model()
    loading = loading_of(model)
    update(loading, tensors(1), 1)
    wider = tensors(2, SHAPES | {"mlp.down": (6, 9)})
    update(loading, wider, 2)
    assert model.runs == 2
    torch.testing.assert_close(parameters(model)["mlp.down"], wider["mlp.down"][:, 4:8], rtol=0, atol=0)


def test_an_update_that_breaks_off_leaves_the_model_ready_for_the_next():
    model = Model()
    loading = loading_of(model)
    update(loading, tensors(1), 1)
    given = tensors(2)
    listed = tensor_index(given, 2)
    del given["norm.weight"]
    reader = ShardReader(Memory(given, listed))
    vllm_loader("reload").initialize_layerwise_reload(model)
    with pytest.raises(KeyError, match="norm"):
        loading.load(reader)
    vllm_loader("reload").finalize_layerwise_reload(model, None)
    update(loading, tensors(3), 3)
    torch.testing.assert_close(parameters(model), expected(tensors(3)), rtol=0, atol=0)
