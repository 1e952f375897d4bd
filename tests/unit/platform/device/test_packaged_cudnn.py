"""The cuDNN of the Python packages takes precedence over one that the linker finds in the system."""

import subprocess
import sys
from pathlib import Path

import pytest

# The module by its path, without its package, which imports torch.
READ = """
import ctypes, os, runpy, sys
from pathlib import Path
loaded = runpy.run_path(sys.argv[3])["load_packaged_cudnn"](os.environ, Path(sys.argv[1]))
print(ctypes.CDLL(sys.argv[2]).used_version(), *loaded, os.environ.get("CUDNN_HOME", "-"))
"""
MODULE = Path(__file__).parents[4] / "megagrpo" / "platform" / "device" / "packaged_cudnn.py"


def library(path: Path, source: str, *options: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(path), f"-Wl,-soname,{path.name}", *options]
    subprocess.run(command, input=source, text=True, check=True)


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A package of version 2 and a system of version 1, each of two libraries, and a library that uses cuDNN."""
    folder = tmp_path_factory.mktemp("cudnn")
    package, system = folder / "packages" / "nvidia" / "cudnn" / "lib", folder / "system"
    for place, version in ((package, 2), (system, 1)):
        library(place / "libcudnn.so.9", f"int version(void) {{ return {version}; }}")
        library(place / "libcudnn_ops.so.9", f"int ops_version(void) {{ return {10 * version}; }}")
    uses = "int version(void); int ops_version(void); int used_version(void) { return version() + ops_version(); }"
    library(folder / "libuser.so", uses, f"-L{system}", "-l:libcudnn.so.9", "-l:libcudnn_ops.so.9")
    return folder


def used(built: Path, packages: str, **variables: str) -> list[str]:
    """The version that the user's library gets, the loaded files, and CUDNN_HOME."""
    command = [sys.executable, "-c", READ, str(built / packages), str(built / "libuser.so"), str(MODULE)]
    environment = {"PATH": "/usr/bin:/bin", "LD_LIBRARY_PATH": str(built / "system"), **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_the_packaged_libraries_are_used_with_another_cudnn_in_the_system(built):
    home = str(built / "packages" / "nvidia" / "cudnn")
    assert used(built, "packages") == ["22", "libcudnn.so.9", "libcudnn_ops.so.9", home]


def test_a_child_that_inherits_the_variable_uses_them_too(built):
    home = str(built / "packages" / "nvidia" / "cudnn")
    assert used(built, "packages", CUDNN_HOME=home)[0] == "22"


@pytest.mark.parametrize("name", ["CUDNN_HOME", "CUDNN_PATH"])
def test_a_folder_that_the_user_names_is_left_alone(built, name):
    assert used(built, "packages", **{name: "/opt/cudnn"})[0] == "11"


def test_without_the_package_the_system_s_is_used(built):
    assert used(built, "nothing") == ["11", "-"]
