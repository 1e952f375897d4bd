"""A data set of a hub: its text files are read as local files are, then without the hub from its cache."""

import json
import os
import subprocess
import sys

import pytest

from tests.unit.weights.hub.hub_server import hub

READ = """
import json, sys
from megagrpo.config import DatasetSection
from megagrpo.data.sources.data_sources import load_rows
rows = load_rows(DatasetSection(source="org/rows", split=sys.argv[1]), "data.train", 0, "prompt")
print(json.dumps(list(rows)))
"""
ROW = {"prompt": "p", "answer": "2024-05-01", "n": 10**30, "mixed": [1, "a", None]}


@pytest.mark.full
def test_text_files_of_the_hub_are_read_without_guesses_and_again_without_the_hub(tmp_path):
    def read(split: str, offline: str) -> list:
        environment = os.environ | {"HF_HOME": str(tmp_path), "HF_ENDPOINT": server.url, "HF_HUB_OFFLINE": offline}
        ended = subprocess.run(
            [sys.executable, "-c", READ, split], env=environment, capture_output=True, text=True, timeout=120
        )
        assert ended.returncode == 0, ended.stderr
        return json.loads(ended.stdout)

    rows = [ROW | {"number": number} for number in (0, 1)]
    with hub() as server:
        files = {f"train-0000{number}-of-00002.jsonl": json.dumps(row).encode() for number, row in enumerate(rows)}
        server.repos["org/rows"] = {"main": {"README.md": b"# rows\n", **files}}
        assert read("train", "0") == rows and sorted(server.fetched) == ["README.md", *files]
        assert read("train[1:]", "1") == rows[1:] and len(server.fetched) == 3
    assert read("train", "0") == rows  # the hub does not respond
