"""Puts the shipped files into the wheel: the folders `configs/` and `launch/` of the repository become folders of
`megagrpo/`. The rest is in pyproject.toml."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class WithShippedFolders(build_py):
    """Copies the folders beside the modules of the package. An editable install reads them from the checkout."""

    def run(self) -> None:
        super().run()
        for folder in () if self.editable_mode else ("configs", "launch"):
            target = Path(self.build_lib, "megagrpo", folder)
            shutil.copytree(folder, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__", "lock.py"))


setup(cmdclass={"build_py": WithShippedFolders})
