"""What a rank opens and imports before and while it trains: at a thousand ranks every file counts a thousand times."""

import json

import pytest

from tests.e2e import world

# Counts Python's opens of the process, and writes them with the names of the loaded modules when a rank ends.
COUNTING = """
import atexit, json, os, sys

if "RANK" in os.environ:
    opened = []
    sys.addaudithook(lambda event, arguments: opened.append(str(arguments[0])) if event == "open" else None)

    def write():
        found = {"opened": list(opened), "modules": list(sys.modules)}
        with open(os.environ["COUNTED"] + os.environ["RANK"], "w") as file:
            json.dump(found, file)

    atexit.register(write)
"""
LIMIT = 3950
# Packages that rank 0 or a leader of a replica needs, or nothing at all.
NOT_TO_TRAIN = (
    *("vllm", "datasets", "pandas", "pyarrow", "tensorboard", "torch.utils.tensorboard", "wandb", "mlflow", "trackio"),
    *("transformers", "accelerate", "tokenizers", "huggingface_hub", "math_verify", "openai", "PIL", "google.protobuf"),
    *("jinja2", "sentencepiece"),
)


@pytest.mark.full
@pytest.mark.timeout(400)
def test_a_rank_that_does_not_generate_opens_few_files(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(COUNTING)
    variables = {"PYTHONPATH": str(tmp_path), "NPROC": "2", "COUNTED": f"{tmp_path}/rank_"}
    run = world.finish(world.start(tmp_path, "parallel.tp=2", "run.max_steps=1", **variables), tmp_path)
    assert run.code == 0, run.err
    first, other = (json.loads((tmp_path / f"rank_{rank}").read_text()) for rank in (0, 1))
    assert "transformers" in first["modules"]  # rank 0 generates, so the names below are the right ones
    assert not [name for name in NOT_TO_TRAIN if name in other["modules"]]
    opened = [name for name in other["opened"] if not name.endswith(".py")]  # source is read where there is no bytecode
    assert len(opened) <= LIMIT, len(opened)
