"""megagrpo submit: a job finds every path that it names, or submit refuses it."""

import subprocess
from pathlib import Path

import pytest

from megagrpo.__main__ import main
from megagrpo.cluster.launch import job as job_module

ROOT = Path(__file__).parents[4]


@pytest.fixture
def shared(monkeypatch, tmp_path):
    """A folder where a user of the wheel submits, on the file system that the cluster's containers mount. It is the
    current folder."""
    (tmp_path / "shared").mkdir()
    monkeypatch.chdir(tmp_path / "shared")
    monkeypatch.setattr(
        job_module, "__file__", str(tmp_path / "site-packages" / "megagrpo" / "cluster" / "launch" / "job.py")
    )
    Path("rows.jsonl").write_text('{"prompt": "1 + 1", "answer": "2"}\n')
    Path("reward.py").write_text("def f(completions, **columns):\n    return [0.0] * len(completions)\n")
    Path("run.yaml").write_text(
        "defaults: megagrpo:quickstart\ndata: {train: {source: rows.jsonl}}\nrewards: {functions: [{function: "
        "reward.py:f}]}\n"
    )
    return tmp_path / "shared"


def cluster_of(kind: str, folder: Path, mount: str | None = None) -> str:
    """The name of a file that describes a cluster of this kind, whose containers mount `folder`."""
    text = f"container: {{runtime: {kind}, image: i, mounts: ['{mount or f'{folder}:{folder}'}']}}\n"
    (folder / f"{kind}.yaml").write_text(f"gpus_per_node: 0\npython: python3\n{text}")
    return str(folder / f"{kind}.yaml")


@pytest.mark.parametrize("kind", ["pyxis", "apptainer"])
def test_a_job_of_the_wheel_names_a_shipped_config_and_no_file_of_this_host(kind, shared, capsys):
    assert main(["submit", "megagrpo:quickstart", "--cluster", cluster_of(kind, shared)]) == 0
    text = capsys.readouterr().out
    assert "megagrpo:quickstart" in text and str(ROOT) not in text and "site-packages" not in text
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0
    assert main(["submit", "run.yaml", "--cluster", cluster_of(kind, shared)]) == 0
    assert str(shared / "run.yaml") in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "outside"),
    [
        ((), ""),
        (("run.output_dir=/else/runs",), "run.output_dir: /else/runs"),
        (("model.path=/else/models/m/",), "model.path: /else/models/m"),
        (("data.train.source=/else/rows.jsonl",), "data.train.source: /else/rows.jsonl"),
        (("rewards.functions.0.function=/else/r.py:f",), "rewards.functions.0.function: /else/r.py"),
        (("rewards.functions.0.function=model:/else/m/m",), "rewards.functions.0.function: /else/m/m"),
    ],
)
def test_a_path_that_no_mount_holds_is_refused_and_named(words, outside, shared, capsys):
    for kind in ("pyxis", "apptainer"):
        code = main(["submit", "run.yaml", *words, "--cluster", cluster_of(kind, shared)])
        printed = capsys.readouterr()
        if outside:
            assert (code, printed.out) == (2, "") and printed.err.rstrip().endswith(f"\n  {outside}")
            assert f"(mounts: {shared}" in printed.err and "container.mounts" in printed.err
        else:
            assert code == 0


@pytest.mark.parametrize("mount", ["/mnt/x:/shared", "{shared}:/other", "{shared}/sub:{shared}/sub"])
def test_a_mount_elsewhere_or_under_another_path_does_not_hold_a_job(mount, shared, capsys):
    mount = mount.format(shared=shared)
    assert main(["submit", "run.yaml", "--cluster", cluster_of("pyxis", shared, mount)]) == 2
    told = capsys.readouterr().err
    assert (
        f"(mounts: {mount})" in told
        and f"the job's folder: {shared}\n" in told
        and f"CONFIG: {shared}/run.yaml" in told
    )


def test_a_run_cannot_write_to_a_mount_that_is_read_only(shared, capsys):
    assert main(["submit", "run.yaml", "--cluster", cluster_of("pyxis", shared, f"{shared}:{shared}:ro")]) == 2
    assert (
        capsys.readouterr()
        .err.rstrip()
        .endswith(
            f"(mounts: {shared}:{shared}:ro); move them below a mount and submit from there, or add "
            f"FOLDER:FOLDER\n  run.output_dir: {shared}/runs"
        )
    )


def test_the_placeholder_of_a_shipped_cluster_is_no_image(shared, capsys):
    Path("mine.yaml").write_text("defaults: megagrpo:clusters/pyxis\ncontainer: {image: registry.example/megagrpo}\n")
    assert main(["submit", "run.yaml", "--cluster", "mine.yaml"]) == 2
    assert "container.image: registry.example/megagrpo is a placeholder" in capsys.readouterr().err
