"""megagrpo submit: its output for each config and cluster, and that no config value becomes a command of the script."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator

from megagrpo.__main__ import main
from megagrpo.cluster.launch import job as job_module
from megagrpo.cluster.launch.job import Cluster, Container, Placement, load_cluster
from megagrpo.cluster.launch.slurm import BEGIN, END, TRAIN_SCRIPT, sbatch_script
from megagrpo.config import ConfigError, RunConfig, load_config
from megagrpo.planner import plan
from tests.unit.for_each import for_each

ROOT = Path(__file__).parents[4]
QUICKSTART = ROOT / "configs" / "quickstart.yaml"
CLUSTERS = sorted((ROOT / "launch" / "clusters").glob("*.yaml"))
PRETEND = ROOT / "launch" / "clusters" / "local_pretend.yaml"
HOSTILE = [
    "a b",
    "$(touch pwned)",
    "`touch pwned`",
    "'; touch pwned; '",
    '"; touch pwned; "',
    "x\ntouch pwned\n",
    "a;b|c&d>e",
    "*",
    "-n",
    "\\",
]
LARGE = {  # configs for clusters: GPUs per node, and GiB of each; trainer nodes x ranks, server nodes x servers
    "qwen3_0.6b_1gpu": (1, 79, (1, 1), (0, 0)),
    "llama3.1_8b_gsm8k_lora_1gpu": (1, 79, (1, 1), (0, 0)),
    "qwen2.5_7b_1node": (8, 79, (1, 8), (0, 0)),
    "qwen3_30b_a3b_1node": (8, 131, (1, 8), (0, 0)),
    "qwen3_30b_a3b_4nodes": (8, 79, (2, 8), (2, 4)),
    "qwen3_32b_2nodes": (8, 131, (1, 8), (1, 4)),
    "llama3.1_70b_8nodes": (8, 79, (5, 8), (3, 2)),
    "qwen3_235b_a22b_16nodes": (8, 79, (8, 8), (8, 1)),
    "deepseek_v3_32nodes": (8, 178, (16, 8), (16, 1)),
}
ON_TWO = ("rollout.placement=dedicated", "rollout.nodes_per_server=2")
KINDS = {
    "plain": {},
    "pyxis": {"container": Container(image="image.sqsh", mounts=("/a:/a", "/b:/b:ro")), "python": "python3"},
    "apptainer": {
        "container": Container(image="image.sif", runtime="apptainer", mounts=("/a:/a",)),
        "python": "python3",
        "interface": "ib0",
    },
}


def config(*overrides, name="quickstart"):
    return load_config(ROOT / "configs" / f"{name}.yaml", overrides)


def place(made: RunConfig, cluster: Cluster) -> Placement:
    return job_module.place(made.run.nodes, made.rollout, cluster)


def script_of(cluster: Cluster, *overrides: str, name: str = "quickstart") -> str:
    made = config(*overrides, name=name)
    return sbatch_script(made, str(ROOT / "configs" / f"{name}.yaml"), overrides, cluster, place(made, cluster))


def settings(script: str) -> dict[str, list[str]]:
    """Bash's reading of a script's settings: name -> words."""
    block = script.partition(BEGIN)[2].partition(END)[0]
    names = sorted(set(re.findall(r"^([A-Z_]+)=", block, re.MULTILINE)))
    show = "".join(f'printf \'%s\\0\' {name} "${{#{name}[@]}}" "${{{name}[@]}}"\n' for name in names)
    told = subprocess.run(["bash", "-c", f"{block}\n{show}"], capture_output=True, text=True, check=True).stdout.split(
        "\0"
    )
    found = {}
    while len(told) > 1:
        name, count = told.pop(0), int(told.pop(0))
        found[name] = [told.pop(0) for _ in range(count)]
    return found


def is_shell(script: str) -> bool:
    return subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True).returncode == 0


def values(script: str, name: str) -> list[str]:
    return settings(script)[name]


# --------------------------------------------------------------------------------------------------------------- output


def test_every_config_for_clusters_is_here():
    small = {"quickstart", "quickstart_pp2", "quickstart_tp3", "quickstart_cp2", "quickstart_2nodes"}
    small |= {"quickstart_sft", "quickstart_dpo", "quickstart_reward", "quickstart_rlhf"}
    assert {path.stem for path in (ROOT / "configs").glob("*.yaml")} == small | set(LARGE)


@for_each("name", LARGE)
def test_configs_for_clusters_fit_their_gpus_and_render(name):
    gpus, memory, trainer, servers = LARGE[name]
    made, cluster = config(name=name), Cluster(gpus_per_node=gpus, gpu_memory_gb=memory)
    placement = place(made, cluster)
    assert (placement.trainer_nodes, placement.ranks_per_node) == trainer
    assert (placement.server_nodes, placement.servers_per_node) == servers
    assert plan(made, placement.world_size, memory).problems == []
    for kind in KINDS.values():
        script = script_of(Cluster(gpus_per_node=gpus, gpu_memory_gb=memory, **kind), name=name)
        assert (
            is_shell(script)
            and f"#SBATCH --nodes={made.run.nodes}\n" in script
            and f"#SBATCH --gpus-per-node={gpus}\n" in script
        )
        assert values(script, "PLAN") == [f"gpu_memory_gb={memory}"]
        ordered = made.parallel.tp > 1 and "experts" not in made.train.overlap  # two micro-batches at once are not
        assert ("--one-connection" in values(script, "PREFLIGHT")) == ordered


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda p: p.stem)
def test_every_example_cluster_renders(path):
    cluster = load_cluster(path)
    script = script_of(cluster)
    assert is_shell(script) and values(script, "MAX_RESTARTS") == [str(cluster.restarts)]
    assert f"#SBATCH --signal=B:USR1@{cluster.lead_seconds}\n" in script and "#SBATCH --requeue\n" in script


def test_the_scripts_are_shell_and_submit_keeps_what_the_plain_one_asks_of_slurm():
    assert all(is_shell(path.read_text()) for path in (ROOT / "launch").glob("*.s*"))
    asked = [line for line in TRAIN_SCRIPT.read_text().splitlines() if line.startswith("#SBATCH --")]
    kept = [line for line in asked if not line.startswith(("#SBATCH --job-name", "#SBATCH --nodes"))]
    assert len(kept) == 5 and set(kept) <= set(script_of(Cluster()).splitlines())


def test_containers_come_before_commands_or_into_srun():
    pyxis, apptainer = (script_of(Cluster(**KINDS[kind])) for kind in ("pyxis", "apptainer"))
    assert values(pyxis, "SRUN_OPTIONS") == [
        "--container-image=image.sqsh",
        "--container-mounts=/a:/a,/b:/b:ro",
        f"--container-workdir={ROOT}",
        "--container-env=PYTHONPATH",
    ]
    named = script_of(Cluster(interface="ib0", env={"MINE": "1"}, **KINDS["pyxis"]))
    assert values(named, "SRUN_OPTIONS")[-1] == "--container-env=PYTHONPATH,NCCL_SOCKET_IFNAME,GLOO_SOCKET_IFNAME,MINE"
    assert values(pyxis, "INSIDE") == [] and values(pyxis, "PYTHON") == ["python3"]
    assert values(apptainer, "INSIDE") == [
        "apptainer",
        "exec",
        "--nv",
        "--pwd",
        str(ROOT),
        "--bind",
        "/a:/a",
        "image.sif",
    ]
    assert values(apptainer, "PREFLIGHT") == ["--gpus", "8", "--interface", "ib0"]
    assert "export NCCL_SOCKET_IFNAME=ib0\n  export GLOO_SOCKET_IFNAME=ib0\n" in apptainer
    assert "--nv" not in values(script_of(Cluster(gpus_per_node=0, **KINDS["apptainer"])), "INSIDE")


def test_a_time_limit_of_the_config_is_asked_for_and_wins():
    cluster = Cluster(sbatch={"time": "01:00:00", "partition": "gpu", "exclusive": True})
    assert "#SBATCH --time=01:00:00\n" in script_of(cluster)
    script = script_of(cluster, "run.time_limit=0:30:00")
    assert script.count("#SBATCH --time=") == 1 and "#SBATCH --time=0:30:00\n" in script
    assert "#SBATCH --partition=gpu\n" in script and "#SBATCH --exclusive\n" in script


@pytest.mark.parametrize("limit", ["0:01:00", "0:00:59"])
def test_a_job_that_would_be_told_to_stop_before_it_begins_is_refused(limit):
    for cluster, overrides in ((Cluster(sbatch={"time": limit}), []), (Cluster(), [f"run.time_limit={limit}"])):
        with pytest.raises(ConfigError, match=f"lead_seconds: 60 s is not less than the job's time limit {limit}"):
            script_of(cluster, *overrides)
    assert f"--time={limit}\n" in script_of(Cluster(sbatch={"time": limit}, lead_seconds=30))


# ------------------------------------------------------------------------------------------------------------ placement


@for_each(
    ("overrides", "gpus", "expected"),
    [
        ([], 8, (1, 1, 8, 0, 0, 0)),
        (["rollout.placement=dedicated", "rollout.servers=3"], 8, (1, 1, 5, 0, 0, 0)),
        (["rollout.urls=[http://10.0.0.1:8000]", "run.nodes=3"], 8, (3, 3, 8, 0, 0, 0)),
        (["rollout.placement=dedicated", "run.nodes=3", "rollout.servers=8"], 8, (3, 2, 8, 1, 8, 0)),
        (["rollout.placement=dedicated", "run.nodes=3", "rollout.servers=4", "rollout.tp=4"], 8, (3, 1, 8, 2, 2, 0)),
        (["rollout.placement=dedicated", "run.nodes=3", "rollout.servers=3", "rollout.tp=2"], 8, (3, 3, 6, 3, 1, 6)),
        # three spare GPUs
        (["rollout.placement=dedicated", "run.nodes=2", "rollout.servers=5"], 8, (2, 1, 8, 1, 5, 0)),
        (["rollout.placement=dedicated", "run.nodes=4", "rollout.servers=2", "rollout.tp=6"], 8, (4, 2, 8, 2, 1, 0)),
        ([*ON_TWO, "run.nodes=5", "rollout.servers=2", "rollout.tp=16"], 8, (5, 1, 8, 4, 1, 0, 2)),
        # four spare GPUs on each node of the server
        ([*ON_TWO, "run.nodes=3", "rollout.tp=8"], 8, (3, 1, 8, 2, 1, 0, 2)),
        ([*ON_TWO, "run.nodes=2", "rollout.tp=2"], 0, (2, 2, 1, 2, 1, 0, 2)),
        ([], 0, (1, 1, 1, 0, 0, 0)),
        (["rollout.placement=dedicated", "run.nodes=3"], 0, (3, 3, 1, 1, 1, 0)),
        (["rollout.placement=dedicated", "run.nodes=3", "rollout.servers=6"], 0, (3, 3, 1, 3, 2, 0)),
    ],
)
def test_ranks_and_servers_get_their_nodes(overrides, gpus, expected):
    assert place(config(*overrides), Cluster(gpus_per_node=gpus)) == Placement(*expected)


@pytest.mark.parametrize(
    ("overrides", "gpus", "message"),
    [
        (
            ["rollout.placement=dedicated", "rollout.servers=8"],
            8,
            r"rollout.servers: 8 x rollout.tp 1 take 8 of the node's 8 GPUs; leave one to the trainer",
        ),
        (
            ["rollout.placement=dedicated", "run.nodes=2", "rollout.servers=17"],
            8,
            r"rollout.servers: 17 x .* nearest: 14, 12",
        ),
        (
            ["rollout.servers=9"],
            8,
            r"rollout.servers: 9 x rollout.tp 1 on 1 node\(s\) need 9 GPUs of each, which has 8; lower one",
        ),
        (
            ["rollout.placement=dedicated", "run.nodes=2", "rollout.tp=9"],
            8,
            r"rollout.tp: a server of 9 GPUs \(rollout.tp 9\) does not fit on a node of 8; lower one, or set "
            r"rollout.nodes_per_server to 2",
        ),
        (
            [*ON_TWO, "run.nodes=3", "rollout.tp=32"],
            8,
            r"rollout.nodes_per_server: 2 nodes give a server 16 GPUs, but rollout.tp 32 need 32; raise it, or lower",
        ),
        (
            [*ON_TWO, "run.nodes=2", "rollout.tp=16"],
            8,
            r"rollout.servers: 1 x rollout.nodes_per_server 2 take all of run.nodes 2; leave a node to the trainer",
        ),
        (
            ["rollout.placement=dedicated", "run.nodes=2", "rollout.servers=3"],
            0,
            r"rollout.servers: 3 is not a multiple of run.nodes 2",
        ),
    ],
)
def test_servers_that_do_not_fit_nodes_are_refused(overrides, gpus, message):
    with pytest.raises(ConfigError, match=message):
        place(config(*overrides), Cluster(gpus_per_node=gpus))


def test_a_node_may_have_spare_gpus():
    beside = ["rollout.placement=dedicated", "run.nodes=2", "rollout.servers=2"]
    assert place(config(), Cluster(ranks_per_node=6)) == Placement(1, 1, 6)
    assert place(config(*beside), Cluster(ranks_per_node=4)) == Placement(2, 2, 4, 2, 1, first_server_gpu=7)
    with pytest.raises(
        ConfigError, match=r"ranks_per_node: 8 ranks need a GPU each, but rollout.servers leaves 7 of 8; lower one"
    ):
        place(config(*beside), Cluster(ranks_per_node=8))
    assert values(script_of(Cluster(ranks_per_node=6)), "RANKS_PER_NODE") == ["6"]


def test_colocated_servers_are_spread_over_all_nodes_and_the_trainer_starts_them():
    shared = place(config("run.nodes=2", "rollout.servers=4", "rollout.tp=4"), Cluster(gpus_per_node=8))
    assert (
        shared == Placement(2, 2, 8)
        and place(config("run.nodes=2", "rollout.servers=2"), Cluster(gpus_per_node=0)).server_nodes == 0
    )
    with pytest.raises(
        ConfigError, match=r"rollout.servers: 3 servers cannot be spread over run.nodes 2 nodes evenly; use a multiple"
    ):
        config("run.nodes=2", "rollout.servers=3")
    with pytest.raises(
        ConfigError,
        match=r"rollout.servers: 4 x rollout.tp 6 on 2 node\(s\) need 12 GPUs of each, which has 8; lower one",
    ):
        place(config("run.nodes=2", "rollout.servers=4", "rollout.tp=6"), Cluster(gpus_per_node=8))


# ------------------------------------------------------------------------------------------------------- hostile values


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="needs shellcheck")
def test_what_is_written_is_clean_shell():
    scripts = [TRAIN_SCRIPT.read_text(), *(script_of(Cluster(**kind)) for kind in KINDS.values())]
    for script in [*scripts, *(path.read_text() for path in (ROOT / "launch").glob("*.s*"))]:
        told = subprocess.run(["shellcheck", "--severity=style", "-"], input=script, capture_output=True, text=True)
        assert told.returncode == 0, told.stdout


@for_each("hostile", HOSTILE)
def test_no_value_becomes_a_command(hostile, tmp_path):
    file = tmp_path / f"c {hostile.replace('/', '')}.yaml"
    file.write_text(QUICKSTART.read_text())
    overrides = [f"run.output_dir=/{hostile}", f"data.system_prompt={hostile}"]
    made = load_config(file, overrides)
    cluster = Cluster(
        python=hostile, interface=hostile, env={"MINE": hostile}, container=Container(image=hostile, mounts=(hostile,))
    )
    in_srun = settings(sbatch_script(made, str(file), overrides, cluster, place(made, cluster)))["SRUN_OPTIONS"]
    assert in_srun[:2] == [f"--container-image={hostile}", f"--container-mounts={hostile}"]
    apptainer = Container(image=hostile, runtime="apptainer", mounts=(hostile,))
    cluster = cluster.model_copy(update={"container": apptainer})
    script = sbatch_script(made, str(file), overrides, cluster, place(made, cluster))
    assert is_shell(script)
    found = settings(script)
    assert found["OVERRIDES"] == overrides and found["CONFIG"] == [str(file)] and found["PYTHON"] == [hostile]
    assert found["RUN_FOLDER"] == [os.path.join(os.path.abspath(f"/{hostile}"), "quickstart")]
    assert found["INSIDE"][-2:] == [hostile, hostile] and found["PREFLIGHT"][-1] == hostile
    block = script.partition(BEGIN)[2].partition(END)[0]
    told = subprocess.run(
        ["bash", "-c", f'{block}\nsetup; printf %s "$MINE"'], capture_output=True, text=True, cwd=tmp_path
    )
    assert told.stdout == hostile and told.stderr == ""
    assert [path.name for path in tmp_path.iterdir()] == [file.name]  # no command ran that makes `pwned`


@for_each("hostile", [*HOSTILE, "run\n", "run\n#SBATCH --x"])
def test_a_name_or_a_time_that_would_leave_its_line_is_refused(hostile):
    for key in ("run.name", "run.time_limit"):
        with pytest.raises(ConfigError, match=f"{key}: must match the pattern"):
            config(f"{key}={hostile}")


def test_a_config_and_a_cluster_are_plain_data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text("python: !!python/object/apply:os.system [touch pwned]\n")
    for load in (load_cluster, load_config):
        with pytest.raises(
            ConfigError, match=r"could not determine a constructor for the tag|the tag .* is not supported"
        ):
            load("c.yaml")
    assert not Path("pwned").exists()


@for_each("value", [v for v in HOSTILE if v not in ("-n", "*")] + [""])
def test_options_of_sbatch_cannot_leave_their_line(value):
    with pytest.raises(ConfigError, match="must not contain spaces, quotes or line breaks"):
        script_of(Cluster(sbatch={"comment": value}))


@pytest.mark.parametrize("name", ["nodes", "signal", "requeue", "a b", "x\n#SBATCH --y"])
def test_options_that_are_set_elsewhere_are_refused(name):
    with pytest.raises(ConfigError, match=r"megagrpo submit sets this option, or sbatch does not have it"):
        script_of(Cluster(sbatch={name: "1"}))


# ------------------------------------------------------------------------------------------------------------- clusters


@for_each(
    ("text", "message"),
    [
        ("gpu_per_node: 8", "gpu_per_node: unknown key; did you mean gpus_per_node"),
        ("gpus_per_node: eight", "gpus_per_node: must be an integer (got 'eight')"),
        ("restarts: -1", "restarts: must be at least 0 (got -1)"),
        ("container: {runtime: docker, image: x}", "container.runtime: must be 'pyxis' or 'apptainer' (got 'docker')"),
        ("container: {runtime: pyxis}", "container.image: required, but missing; set it"),
        ("container: x", "container: must be a mapping of `key: value` (got 'x')"),
        ("env: {'a b': 1}", "env: 'a b' is not a valid name of an environment variable"),
        ("env: {'X=$(touch pwned)': 1}", "is not a valid name of an environment variable"),
        (
            "env: {HF_TOKEN: hf_abc}",
            "env: HF_TOKEN would expose a secret in the job script; `export` it where you submit",
        ),
        ("- a", "must hold `section: ...` keys at the top, not a list"),
        ("a: [", "not valid YAML"),
    ],
)
def test_mistakes_in_a_cluster_are_told(text, message, tmp_path):
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_cluster(tmp_path / "c.yaml")


def test_a_cluster_may_extend_another_file_and_its_variables_are_texts(tmp_path):
    (tmp_path / "c.yaml").write_text(f"defaults: {PRETEND}\nrestarts: 1\ninterface: eth0\nenv: {{MINE: 2}}\n")
    cluster = load_cluster(tmp_path / "c.yaml")
    assert (cluster.gpus_per_node, cluster.restarts, cluster.env["MINE"]) == (0, 1, "2")
    assert cluster.variables["NCCL_SOCKET_IFNAME"] == "eth0" and cluster.variables["GLOO_SOCKET_IFNAME"] == "lo"
    (tmp_path / "shipped.yaml").write_text("defaults: megagrpo:clusters/local_pretend\nrestarts: 1\n")
    assert load_cluster(tmp_path / "shipped.yaml") == load_cluster(PRETEND).model_copy(update={"restarts": 1})
    (tmp_path / "bare.yaml").write_text("defaults: generic\n")
    with pytest.raises(ConfigError, match=r"bare.yaml\); did you mean `megagrpo:clusters/generic`\?"):
        load_cluster(tmp_path / "bare.yaml")


# --------------------------------------------------------------------------------------------------------- command line


def test_the_script_is_printed_and_nothing_of_torch_is_imported():
    code = (
        "import sys; sys.modules['torch'] = None; from megagrpo.__main__ import main; sys.exit(main(['submit', "
        "*sys.argv[1:]]))"
    )
    words = [str(QUICKSTART), "run.max_steps=3", "--cluster", str(PRETEND), "--sbatch", "dependency=singleton"]
    ended = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, cwd=ROOT)
    assert ended.returncode == 0, ended.stderr
    assert is_shell(ended.stdout) and "#SBATCH --dependency=singleton\n" in ended.stdout
    assert values(ended.stdout, "OVERRIDES") == ["run.max_steps=3"]


def test_a_shipped_cluster_has_a_name_and_a_wrong_one_is_told(capsys):
    for name in ("local_pretend", "megagrpo:clusters/local_pretend"):
        assert main(["submit", str(QUICKSTART), "--cluster", name]) == 0
        assert is_shell(capsys.readouterr().out)
    assert main(["submit", str(QUICKSTART), "--cluster", "generik"]) == 2
    told = (
        "--cluster: generik is neither a file nor a shipped cluster; name a YAML file, or one of apptainer, generic, "
    )
    assert told in capsys.readouterr().err
    assert (
        main(["submit", str(QUICKSTART)]) == 2
        and "--cluster: required, but missing; name a YAML file, or one of apptainer, " in capsys.readouterr().err
    )


def test_a_job_works_in_the_clone_and_without_one_in_the_current_folder(monkeypatch, tmp_path):
    assert job_module.job_folder() == ROOT
    installed = tmp_path / "site-packages" / "megagrpo" / "cluster" / "launch" / "job.py"
    monkeypatch.setattr(job_module, "__file__", str(installed))
    monkeypatch.chdir(tmp_path)
    script = script_of(Cluster())
    assert values(script, "REPOSITORY") == [str(tmp_path)] and values(script, "PYTHON") == [sys.executable]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run.max_stepz=3"], "did you mean run.max_steps?"),
        (["parallel.tp=2", "parallel.pp=2"], "parallel.tp: num_attention_heads=9 is not divisible by tp=2"),
        (["--sbatch", "signal=USR2"], "sbatch.signal: megagrpo submit sets this option"),
    ],
)
def test_what_cannot_run_is_not_sent(words, message, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["submit", str(QUICKSTART), *words, "--cluster", str(PRETEND), "--submit"]) == 2
    assert message in capsys.readouterr().err


def test_a_machine_without_the_hubs_package_leaves_the_plan_to_the_job(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    words = [
        str(ROOT / "configs" / "qwen2.5_7b_1node.yaml"),
        "--cluster",
        str(ROOT / "launch" / "clusters" / "generic.yaml"),
    ]
    assert main(["submit", *words]) == 0
    printed = capsys.readouterr()
    assert is_shell(printed.out)
    assert (
        printed.err
        == "not checked on this host: model.path: Qwen/Qwen2.5-7B-Instruct needs huggingface_hub, which is not "
        "installed on this host\n"
    )


def test_a_machine_without_the_models_package_leaves_the_plan_to_the_job(capsys):
    assert main(["submit", str(QUICKSTART), "model.path=package:no_such_model", "--cluster", str(PRETEND)]) == 0
    printed = capsys.readouterr()
    assert is_shell(printed.out)
    assert printed.err.startswith(
        "not checked on this host: model.path: package:no_such_model needs no_such_model, which is not installed"
    )


def test_submit_gives_the_script_to_sbatch(capfd, monkeypatch, tmp_path):
    (tmp_path / "sbatch").write_text("#!/bin/bash\n[ $# = 0 ] || exit 9\nhead -n 2\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert main(["submit", str(QUICKSTART), "--resume", "--cluster", str(PRETEND), "--submit"]) == 0
    assert capfd.readouterr().out == "#!/usr/bin/env bash\n# quickstart: written by megagrpo submit\n"
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert main(["submit", str(QUICKSTART), "--cluster", str(PRETEND), "--submit"]) == 2
    assert "sbatch: command not found" in capfd.readouterr().err


# ----------------------------------------------------------------------------------------------------------- Kubernetes


def test_the_example_of_kubernetes_has_the_fields_of_its_schema_and_the_servers_of_its_config():
    (document,) = yaml.safe_load_all((ROOT / "launch" / "jobset.yaml").read_text())
    schemas = yaml.safe_load((Path(__file__).parent / "kubernetes_schemas.yaml").read_text())
    assert list(Draft202012Validator(schemas["JobSet"]).iter_errors(document)) == []
    trainer, servers = (job["template"]["spec"] for job in document["spec"]["replicatedJobs"])
    command = trainer["template"]["spec"]["containers"][0]["command"]
    config = next(word for word in command if word.startswith("megagrpo:"))
    rollout = load_config(config, command[command.index(config) + 1 :]).rollout
    placed = place(load_config(config, []), Cluster())
    assert rollout.placement == "external" and len(rollout.urls) == placed.server_nodes * placed.servers_per_node
    assert f"--wait-for={','.join(rollout.urls)}" in command and f"--nodes={placed.trainer_nodes}" in command
    assert (trainer["completions"], servers["completions"]) == (placed.trainer_nodes, placed.server_nodes)
