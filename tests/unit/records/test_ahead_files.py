"""Groups in files: those of a checkpoint, generated ahead, and the kept ones of a run; read by other replicas."""

import json
from pathlib import Path

import pytest
from ranks import run_ranks

from megagrpo.config import ParallelSection
from megagrpo.platform.parallel.layout import init_layout
from megagrpo.records.checkpoints.ahead_files import read_ahead, sums_of_ahead, write_ahead
from megagrpo.records.rows.kept_rollouts import KeptFiles, KeptRollouts, last_kept_step
from megagrpo.types import Prompt, Rollout, ScoredRollout
from megagrpo.weights.files.file_checksums import CHECKSUMS, checksums, verify_others, verify_tensors


def groups(places) -> list[dict]:
    return [{"place": place, "prompt_id": 2 * place, "rollouts": [{"text": f"é {place}"}]} for place in places]


def write(folder: Path) -> dict[str, str]:
    layout = init_layout(ParallelSection())
    mine = groups(range(layout.dp_rank, 12, layout.dp_size)) if layout.dp_rank != 1 else []
    return sums_of_ahead(write_ahead(mine, folder, layout.dp_rank), layout)


def test_each_replica_of_any_number_finds_the_groups_whose_place_is_its_own(tmp_path):
    sums = run_ranks(write, 3, tmp_path)
    written = checksums(tmp_path, sorted(tmp_path.iterdir()))
    assert sums == [written] * 3 and list(written) == ["ahead_0.jsonl", "ahead_2.jsonl"]  # replica 1 had none
    places = [place for place in range(12) if place % 3 != 1]
    for size in (1, 2, 3, 5):
        found = [list(read_ahead(tmp_path, rank, size)) for rank in range(size)]
        assert [sorted(g["place"] for g in of_rank) for of_rank in found] == [
            [place for place in places if place % size == rank] for rank in range(size)
        ]
        assert sorted((g for of_rank in found for g in of_rank), key=lambda g: g["place"]) == groups(places)


def test_a_damaged_file_is_found_by_the_rank_that_verifies_it(tmp_path):
    crc = write_ahead(groups([1, 3]), tmp_path, 1)
    (tmp_path / CHECKSUMS).write_text(json.dumps({"ahead_1.jsonl": f"{crc:08x}"}))
    verify_tensors(tmp_path, 1, 2)
    (tmp_path / "ahead_1.jsonl").write_bytes(b"x" + (tmp_path / "ahead_1.jsonl").read_bytes()[1:])
    verify_others(tmp_path)
    verify_tensors(tmp_path, 0, 2)
    with pytest.raises(ValueError, match=r"ahead_1.jsonl is corrupt: its CRC-32 is \w+; \w+ was written"):
        verify_tensors(tmp_path, 1, 2)
    with pytest.raises(ValueError, match="has a line without a place; remove the file"):
        list(read_ahead(tmp_path, 0, 1))


def drawn(step: int, size: int, rank: int) -> list[ScoredRollout]:
    """The rollouts of a replica's slice of six groups, of which two are of one prompt."""
    rows = [10, 11, 12, 13, 10, 15]
    mine = range(len(rows) * rank // size, len(rows) * (rank + 1) // size)
    prompts = [Prompt(rows[i], (rows[i], 1), "q", occurrence=rows[:i].count(rows[i])) for i in mine]
    pairs = [(i, p, k) for i, p in zip(mine, prompts, strict=True) for k in (1, 2)]
    made = [Rollout(p, (i, step, k), (-0.5,) * 3, "stop", step, f"{i} {k}") for i, p, k in pairs]
    return [ScoredRollout(rollout, {}, 0.0) for rollout in made]


def keep(folder: Path, steps, size: int, last_step: int = 0, limit: float = 1e9, say=print) -> None:
    for rank in range(size):
        files = KeptFiles(folder, (rank, size), last_step, limit, say)
        for step in steps:
            files.keep(step, 100 + step, drawn(step, size, rank))
        files.close()


def texts(kept: KeptRollouts, step: int, n: int = 2) -> list[list[str]]:
    prompts = [one.rollout.prompt for one in drawn(step, 1, 0)[::2]]
    return [[rollout.text for rollout in kept.group(step, 100 + step, prompt, n)] for prompt in prompts]


def kept_at(folder: Path, by: str = "step") -> KeptRollouts:
    return KeptRollouts(folder, by, lambda ids: f"decoded {len(ids)}")


EXPECTED = [[f"{i} 1", f"{i} 2"] for i in range(6)]


def test_kept_groups_are_found_whatever_number_of_replicas_wrote_them_and_after_a_resumption(tmp_path):
    keep(tmp_path / "rollouts", (1, 2, 3), size=3)
    with open(tmp_path / "rollouts" / "replica_0.index.jsonl", "ab") as file:
        file.write(b'{"step": 4, "gro')  # a kill
    keep(tmp_path / "rollouts", (3, 4), size=2, last_step=2)  # resumed on fewer replicas after step 2
    assert last_kept_step(tmp_path) == 4
    kept = kept_at(tmp_path)
    assert [texts(kept, step) for step in (2, 3, 4)] == [EXPECTED] * 3
    assert [group[0].weight_version for group in [kept.group(4, 104, Prompt(11, (11, 1), ""), 2)]] == [4]
    assert sum(path.read_text().count('"step": 3') for path in (tmp_path / "rollouts").glob("*.index.jsonl")) == 2
    by_prompt = kept_at(tmp_path, "prompt")
    assert by_prompt.prompt_ids == {10, 11, 12, 13, 15}
    assert by_prompt.group(9, 77, Prompt(13, (13, 1), ""), 1)[0].text == "3 1"


def test_a_limit_or_a_full_disk_ends_what_is_kept_and_says_up_to_which_step(tmp_path):
    said = []
    keep(tmp_path / "rollouts", (1,), size=1)
    size = (tmp_path / "rollouts" / "replica_0.jsonl").stat().st_size
    keep(tmp_path / "more", (1, 2, 3, 4), size=1, limit=2.5 * size, say=said.append)
    assert (
        said == ["run.keep_rollouts_gb is reached: rollouts up to step 2 are kept"]
        and last_kept_step(tmp_path / "more") == 2
    )


FAULTS = {
    "another prompt": ({}, (9, 9), "its prompt has other tokens now"),
    "too few": ({"rollouts": slice(0, 1)}, (11, 1), "1 rollouts where rollout.num_generations is 2"),
    "other lengths": ({"rollout_logprobs": [0.0]}, (11, 1), "3 response_ids and 1 rollout_logprobs"),
    "no finish": ({"finish_reason": None}, (11, 1), "no 'finish_reason'"),
    "no ids": ({"response_ids": []}, (11, 1), "0 response_ids"),
    "text for ids": ({"response_ids": "x!"}, (11, 1), "row 11: "),
    "no mapping": ({"rollouts": 3}, (11, 1), "row 11: "),
}


def test_each_fault_of_a_kept_group_is_named_with_its_line(tmp_path):
    wrong = []
    for name, (change, tokens, expected) in FAULTS.items():
        keep(tmp_path / name / "rollouts", (1,), size=1)
        file = tmp_path / name / "rollouts" / "replica_0.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        for key, value in change.items():
            if key == "rollouts":
                rows[1][key] = rows[1][key][value] if isinstance(value, slice) else value
            elif value is None:
                del rows[1]["rollouts"][0][key]
            else:
                rows[1]["rollouts"][0][key] = value
        file.with_suffix(".index.jsonl").unlink()  # as another program writes it
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        try:
            kept_at(tmp_path / name).group(1, 101, Prompt(11, tokens, ""), 2)
            wrong.append((name, "no error"))
        except LookupError as error:
            wrong += [] if expected in str(error) and str(file) in str(error) else [(name, str(error))]
    assert not wrong
    with pytest.raises(LookupError, match=r"no rollouts of row 99 in step 1.*rollout\.kept\.by=prompt"):
        kept_at(tmp_path / "too few").group(1, 101, Prompt(99, (1,), ""), 2)
    (tmp_path / "bad.jsonl").write_text('{"prompt_id": 1, "rollouts": []}\n[]\n')
    with pytest.raises(ValueError, match=r"bad.jsonl, line 2: not a group of rollouts"):
        kept_at(tmp_path / "bad.jsonl", "prompt")
    with pytest.raises(ValueError, match="has no kept rollouts; name the folder of a run"):
        kept_at(tmp_path / "none")
