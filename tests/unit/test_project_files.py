"""Files for GitHub, citations, releases and containers: they parse, and name commands and files that exist."""

import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from megagrpo.platform.install import steps
from megagrpo.platform.install.requirements import INSTALL_KINDS, constraints

REPOSITORY = Path(__file__).parents[2]
GITHUB = sorted((REPOSITORY / ".github").rglob("*.yml"))
VERSION = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]
DOCKERFILE = (REPOSITORY / "docker" / "Dockerfile").read_text()
APPTAINER = (REPOSITORY / "docker" / "megagrpo.def").read_text()
OF_RUNNERS = {"gh"}  # programs that GitHub's machines have


def read(path: Path) -> dict:
    """A YAML file; YAML 1.1 reads the key `on` as true."""
    return {"on" if key is True else key: value for key, value in yaml.safe_load(path.read_text()).items()}


def test_workflows_and_forms_are_here():
    names = {str(path.relative_to(REPOSITORY / ".github")) for path in GITHUB}
    forms = {f"ISSUE_TEMPLATE/{name}.yml" for name in ("bug", "feature", "question", "config")}
    assert names == forms | {"workflows/test.yml", "workflows/release.yml"}


@pytest.mark.parametrize(
    "path", sorted((REPOSITORY / ".github" / "workflows").glob("*.yml")), ids=lambda path: path.stem
)
def test_a_workflow_runs_programs_of_the_repository(path):
    workflow = read(path)
    assert set(workflow) >= {"name", "on", "permissions", "jobs"}
    for job in workflow["jobs"].values():
        assert job["runs-on"] and job["timeout-minutes"]
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step)
            if "uses" in step:
                assert re.fullmatch(r"actions/(checkout|setup-python)@v\d+", step["uses"])
                version = step.get("with", {}).get("python-version-file", ".python-version")
                assert (REPOSITORY / version).read_text().strip() == "3.12"
            else:
                program = shlex.split(step["run"])[0]
                assert program in OF_RUNNERS or (REPOSITORY / program).stat().st_mode & 0o111, program


def test_each_push_and_each_pull_request_runs_the_tests_and_a_tag_makes_a_release():
    test, release = (read(REPOSITORY / ".github" / "workflows" / f"{name}.yml") for name in ("test", "release"))
    assert "pull_request" in test["on"] and test["on"]["push"]["branches"] == ["main"]
    assert [step["run"] for step in test["jobs"]["test"]["steps"] if "run" in step] == [".ci/run"]
    assert release["on"]["push"]["tags"] == ["v*"]
    build, publish = (step["run"] for step in release["jobs"]["release"]["steps"] if "run" in step)
    assert build == '.ci/release "$GITHUB_REF_NAME" dist' and "dist/*" in publish and "--notes-file dist.md" in publish


@pytest.mark.parametrize("name", ["bug", "feature", "question"])
def test_an_issue_form_asks_for_the_version(name):
    form = read(REPOSITORY / ".github" / "ISSUE_TEMPLATE" / f"{name}.yml")
    assert set(form) == {"name", "description", "labels", "body"}
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert len({field["id"] for field in fields}) == len(fields) and all(
        field["attributes"]["label"] for field in fields
    )
    assert (
        "`megagrpo --version`"
        in next(field for field in fields if field["id"] == "version")["attributes"]["description"]
    )
    assert any(field.get("validations", {}).get("required") for field in fields)


def test_the_citation_has_the_version_of_the_package():
    citation = read(REPOSITORY / "CITATION.cff")
    assert citation["cff-version"] == "1.2.0" and citation["message"] and citation["title"]
    assert citation["authors"] == [{"name": "megagrpo developers"}] and citation["license"] == "Apache-2.0"
    assert citation["version"] == VERSION


# ------------------------------------------------------------------------------------------------------------- releases


@pytest.fixture
def release(tmp_path):
    """Copies of the files that a release reads; call it with a tag."""
    (tmp_path / ".ci").mkdir()
    for name in ("pyproject.toml", "CITATION.cff", ".ci/release"):
        (tmp_path / name).write_text((REPOSITORY / name).read_text())
    (tmp_path / "CHANGELOG.md").write_text(
        f"# Changelog\n\n## Unreleased\n\n- later\n\n## {VERSION}\n\n- news\n\n## 0.0.1\n\n- old\n"
    )

    def run(tag: str) -> subprocess.CompletedProcess:
        command = ["bash", str(tmp_path / ".ci" / "release"), tag, str(tmp_path / "dist")]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    run.folder = tmp_path
    return run


def test_a_tag_that_is_not_the_version_makes_no_release(release):
    ended = release("v99.0")
    assert (
        ended.returncode == 2
        and f"the tag is v99.0, but pyproject.toml has version {VERSION}; tag v{VERSION}" in ended.stderr
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [("CITATION.cff", "CITATION.cff has another version"), ("CHANGELOG.md", f"no heading '## {VERSION}'")],
)
def test_a_version_that_a_file_does_not_name_makes_no_release(release, name, message):
    (release.folder / name).write_text("version: 99.0\n")
    ended = release(f"v{VERSION}")
    assert ended.returncode == 2 and message in ended.stderr


def test_the_notes_of_a_release_are_its_part_of_the_changelog(release):
    release(f"v{VERSION}")  # ends at git: the folder is no repository
    assert (release.folder / "dist.md").read_text().split() == ["-", "news"]


# ----------------------------------------------------------------------------------------------------------- containers


def test_both_recipes_start_from_the_same_image_and_run_the_same_script():
    (image,) = re.findall(r"^FROM (\S+)$", DOCKERFILE, re.MULTILINE)
    assert re.findall(r"^From: (\S+)$", APPTAINER, re.MULTILINE) == [image]
    assert image.startswith(f"python:{(REPOSITORY / '.python-version').read_text().strip()}-")
    assert re.findall(r"^RUN (.*)$", DOCKERFILE, re.MULTILINE) == [
        '/opt/megagrpo/docker/install.sh "$KIND" /opt/megagrpo'
    ]
    assert '/opt/megagrpo/docker/install.sh "{{ KIND }}" /opt/megagrpo' in APPTAINER
    assert "ARG KIND=cpu" in DOCKERFILE and "KIND=cpu" in APPTAINER
    variables = dict(re.findall(r"(\w+)=(\w+)", DOCKERFILE[DOCKERFILE.index("ENV ") : DOCKERFILE.index("COPY")]))
    assert dict(re.findall(r"export (\w+)=(\w+)", APPTAINER)).items() <= variables.items()


def test_both_recipes_copy_the_same_files_and_nothing_is_missing():
    docker = {name for line in re.findall(r"^COPY (.*)$", DOCKERFILE, re.MULTILINE) for name in line.split()[:-1]}
    section = APPTAINER.partition("%files\n")[2].partition("\n\n")[0]
    assert {name: f"/opt/megagrpo/{name}" for name in docker} == dict(line.split() for line in section.splitlines())
    assert (
        all((REPOSITORY / name).exists() for name in docker)
        and {"pyproject.toml", "setup.py", "megagrpo", "configs"} <= docker
    )


def test_the_sections_of_the_apptainer_recipe_are_known():
    assert (
        re.findall(r"^%(\w+)$", APPTAINER, re.MULTILINE) == "arguments files post environment runscript labels".split()
    )


def test_the_script_of_the_recipes_installs_the_versions_of_the_constraints():
    script = (REPOSITORY / "docker" / "install.sh").read_text()
    assert (
        '-c "$SOURCE/megagrpo/platform/install/constraints-$KIND.txt" "$SOURCE"' in script
        and "megagrpo.commands.setup.install" in script
    )
    assert all(constraints(kind).name == f"constraints-{kind}.txt" for kind in INSTALL_KINDS)
    assert set(steps.VLLM) == set(INSTALL_KINDS)
    ended = subprocess.run(["bash", str(REPOSITORY / "docker" / "install.sh")], capture_output=True, text=True)
    assert ended.returncode == 2 and "usage: docker/install.sh cpu|gpu SOURCE" in ended.stderr
    ended = subprocess.run(
        ["bash", str(REPOSITORY / "docker" / "install.sh"), "tpu", "."], capture_output=True, text=True
    )
    assert ended.returncode == 2 and "unknown kind 'tpu'; use cpu or gpu" in ended.stderr
    assert "cpu) SYSTEM=libnuma1" in script, "the library that check_libraries asks for"


@pytest.mark.parametrize("name", ["pyxis", "apptainer"])
def test_cluster_files_name_the_recipe_of_their_image(name):
    text = (REPOSITORY / "launch" / "clusters" / f"{name}.yaml").read_text()
    recipe = "docker/megagrpo.def" if name == "apptainer" else "docker/Dockerfile"
    assert recipe in text and (REPOSITORY / recipe).is_file()
