"""tools/test-gpu.sh, without a GPU: which Python it takes, and what it says where it cannot begin.

The modules that it asks for are stand-ins, but for pytest.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TORCH = """
__version__ = "2.9.1+cu130"
class cuda:
    is_available = staticmethod(lambda: False)
device = str
"""


@pytest.fixture
def modules(tmp_path):
    (tmp_path / "torch.py").write_text(TORCH)
    for name in ("torchvision", "tqdm"):
        (tmp_path / f"{name}.py").touch()
    return tmp_path


def script(*words, **environment):
    return subprocess.run(
        ["tools/test-gpu.sh", *words],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )


def test_a_python_that_lacks_something_is_named_with_it(modules, tmp_path):
    python = tmp_path / "a python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')  # without its packages
    python.chmod(0o755)
    done = script(PYTHON=str(python), PYTHONPATH=str(modules))
    assert done.returncode == 1
    assert done.stderr.startswith(f"tandem: {python} lacks: pytest. Name a Python with")
    assert script(PYTHON="/no/such/python").stderr.startswith(
        "tandem: /no/such/python lacks: a Python that runs."
    )


def test_the_first_python_of_the_path_that_has_all_is_taken(modules, tmp_path):
    for name, flag in (("first", "-S"), ("second", "")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "python3").write_text(f'#!/bin/sh\nexec {sys.executable} {flag} "$@"\n')
        (folder / "python3").chmod(0o755)
    path = f"{tmp_path / 'first'}:{tmp_path / 'second'}:/usr/bin:/bin"
    done = script(PATH=path, PYTHON="", PYTHONPATH=str(modules))
    assert f"torch 2.9.1+cu130 of {sys.executable} sees no GPU" in done.stdout + done.stderr
