"""Puts the shipped configs into the wheel: `configs/` of the repository becomes `megagrpo/configs/`. The rest is in
pyproject.toml."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class WithConfigs(build_py):
    """Copies `configs/` beside the modules of the package. An editable install reads it from the checkout."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib, "megagrpo", "configs")
            shutil.copytree("configs", target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))


setup(cmdclass={"build_py": WithConfigs})
