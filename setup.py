"""What pip builds of this checkout: tandem/ alone, with the rules that it needs (pyproject.toml has
the rest). `tandem/standalone.py` says why they are inside."""

import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).parent))
from tandem.standalone import write


class WithRules(build_py):
    def run(self) -> None:
        write(Path(self.build_lib))


setup(cmdclass={"build_py": WithRules})
