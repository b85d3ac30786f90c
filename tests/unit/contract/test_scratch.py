"""Temporary folders: those of a killed program go, those of a running one stay."""

import subprocess
import sys
from pathlib import Path

import pytest

from contract import scratch

MAKER = """
import sys
from contract.scratch import make_scratch
folder, lock = make_scratch()
print(folder, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def start_maker(tmp_path):
    """start_maker() -> a process that has made a folder, and the folder."""
    makers = []

    def start_maker():
        pipe = subprocess.PIPE
        argv, env = [sys.executable, "-c", MAKER], {"TMPDIR": str(tmp_path)}
        maker = subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True, env=env)
        makers.append(maker)
        return maker, Path(maker.stdout.readline().strip())

    yield start_maker
    for maker in makers:
        maker.kill()
        maker.communicate()


def test_the_folder_of_a_killed_program_goes_at_the_next_start(start_maker, tmp_path):
    user_folder = tmp_path / f"{scratch.PREFIX}photos"
    user_folder.mkdir()
    killed, abandoned = start_maker()
    _, kept = start_maker()
    assert abandoned.is_dir() and kept.is_dir()
    killed.kill()
    killed.wait()
    _, fresh = start_maker()
    assert not abandoned.exists()
    assert kept.is_dir() and fresh.is_dir() and user_folder.is_dir()
