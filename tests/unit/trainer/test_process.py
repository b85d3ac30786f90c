"""How a process of the trainer ends: its words first, at once, and all of --spawn together."""

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import pytest

from contract.options import Options
from tests.trainer_ranks import CONTEXT
from trainer import __main__ as program
from trainer import process

FORK = multiprocessing.get_context("fork")


def broken(options, world):
    process.dist.is_initialized = lambda: True
    raise ValueError("broken on purpose")


def failing(said):
    """The program, of which a run fails while its group stands."""
    os.dup2(os.open(said, os.O_CREAT | os.O_WRONLY), 2)
    sys.argv = ["trainer", "--data", "/nowhere"]
    sys.exit = lambda code: print("an end with tear-down", file=sys.stderr)
    process.Run = broken
    program.run()


def test_an_exception_is_said_last_and_the_code_is_1(tmp_path):
    """NCCL's tear-down waits for a collective, or the watchdog ends it with another code."""
    child = CONTEXT.Process(target=failing, args=(str(tmp_path / "said"),))
    child.start()
    child.join()
    assert child.exitcode == 1
    lines = (tmp_path / "said").read_text().splitlines()
    assert lines[-1] == "ValueError: broken on purpose"


def test_ctrl_c_is_a_code(monkeypatch):
    monkeypatch.setattr(process, "work", mock.Mock(side_effect=KeyboardInterrupt))
    assert process.begin(Options()) == 130


QUICK = """
import runpy, sys
try:
    runpy.run_module("trainer", run_name="__main__")
except SystemExit as end:
    print("torch" in sys.modules, end.code)
"""


@pytest.mark.parametrize(("word", "code"), [("--help", 0), ("--epoch=3", 2)])
def test_help_and_refused_options_do_not_wait_for_torch(word, code):
    command = [sys.executable, "-c", QUICK, word]
    made = subprocess.run(command, capture_output=True, text=True)
    assert made.stdout.splitlines()[-1] == f"False {code}"


def mode(folder):
    return Path(folder).stat().st_mode & 0o777


def test_no_other_user_can_plant_compiled_code(tmp_path, monkeypatch):
    """torch.compile loads pickles from a folder that is by default in /tmp, by a known name."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "x")
    monkeypatch.delenv("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS")
    inductor, triton = program.COMPILED
    monkeypatch.setenv(triton, "named by the user")
    monkeypatch.setenv(inductor, "x")
    folder = tmp_path / "tandem/inductor"
    plants = {"open to all": Path.mkdir, "a link": lambda path: path.symlink_to("/tmp"),
              "a file": Path.touch, "another user's": planted}  # fmt: skip
    for name, plant in (("none", None), *plants.items()):
        monkeypatch.delenv(inductor)
        if folder.is_dir() and not folder.is_symlink():
            folder.rmdir()
        folder.unlink(missing_ok=True)
        if plant:
            plant(folder)
        program.name_compile_caches()
        ours = name in ("none", "open to all") or (name == "another user's" and os.getuid())
        assert (os.environ[inductor] == str(folder)) is bool(ours), name
        assert Path(os.environ[inductor]).parent in (folder.parent, tmp_path)
        assert mode(os.environ[inductor]) == 0o700
    assert os.environ[triton] == "named by the user"
    # torch keeps those in /tmp by a known name, whichever folder its other files go to.
    assert os.environ["TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"] == "0"


def planted(path):
    path.mkdir(mode=0o777)
    path.chmod(0o777)
    if os.getuid() == 0:
        os.chown(path, 65534, -1)


def leaving(code, after):
    time.sleep(after)
    os._exit(code)


def hanging(number=None):
    if number:
        os.kill(os.getpid(), number)
    time.sleep(1000)


def first(*works):
    """Of --spawn's ranks that do so: the exit code, and each rank's own."""
    ranks = [FORK.Process(target=work, args=args) for work, *args in works]
    for rank in ranks:
        rank.start()
    code = process.first_failure(ranks)
    return code, [rank.exitcode for rank in ranks]


def test_the_first_failure_ends_the_ranks_that_wait_for_it(monkeypatch):
    """mp.spawn asks them to leave, and waits for ever where they are in a collective."""
    monkeypatch.setattr(process, "GRACE_SECONDS", 0.2)
    assert first((leaving, 0, 0), (leaving, 7, 0), (hanging,)) == (7, [0, 7, -9])
    # One that was killed, as a shell tells it.
    assert first((hanging, signal.SIGTERM), (hanging,)) == (143, [-15, -9])


def test_ranks_that_stop_together_are_left_alone():
    assert first((leaving, 75, 0), (leaving, 75, 0.1)) == (75, [75, 75])
    assert first((leaving, 0, 0), (leaving, 0, 0.1)) == (0, [0, 0])


def test_a_rank_that_hangs_at_its_end_is_not_waited_for_for_ever(monkeypatch):
    monkeypatch.setattr(process, "TEAR_DOWN_SECONDS", 0.2)
    assert first((leaving, 0, 0), (hanging,)) == (137, [0, -9])
