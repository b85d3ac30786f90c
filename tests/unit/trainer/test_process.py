"""How a process of the trainer ends: its words first, at once, and all of --spawn together."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.trainer_ranks import free_port
from trainer import __main__ as program
from trainer import process

FORK = multiprocessing.get_context("fork")

HANGING = """
import os, sys
import torch.distributed as dist
from trainer import process

class Group:
    def __del__(self):
        print("tear-down")

process.dist.is_initialized = lambda: True
group = Group()
print("words")
process.leave(76)
"""


def test_nothing_is_torn_down_while_the_group_stands():
    """NCCL's tear-down waits for a collective, or the watchdog ends it with another code."""
    made = subprocess.run([sys.executable, "-c", HANGING], capture_output=True, text=True)
    assert (made.returncode, made.stdout) == (76, "words\n")


QUICK = """
import runpy, sys
try:
    runpy.run_module("trainer", run_name="__main__")
except SystemExit as end:
    print("torch" in sys.modules, end.code)
"""


@pytest.mark.parametrize(
    ("word", "code", "said"),
    [
        ("--help", 0, "--epochs"),
        ("--epoch=3", 2, "trainer: unknown option --epoch"),
        ("--sync-rule=qsr:1", 2, "--sync_rule is no longer there: no strategy has rounds"),
    ],
)
def test_help_and_refused_options_do_not_wait_for_torch(word, code, said):
    command = [sys.executable, "-c", QUICK, word]
    made = subprocess.run(command, capture_output=True, text=True)
    assert made.stdout.splitlines()[-1] == f"False {code}"
    assert said in made.stdout + made.stderr


FAILING = """
import sys
from unittest import mock
from trainer import __main__ as program

def broken(options, world):
    raise ValueError("broken on purpose")

if __name__ == "__main__":
    with mock.patch("trainer.process.Run", broken):
        program.run()
"""


def test_an_exception_is_said_last_and_the_code_is_1():
    env = {
        **os.environ, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }  # fmt: skip
    made = subprocess.run([sys.executable, "-c", FAILING], capture_output=True, text=True, env=env)
    assert made.returncode == 1
    assert made.stderr.splitlines()[-1] == "ValueError: broken on purpose"


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
    monkeypatch.setattr(process, "GRACE", 0.3)
    assert first((leaving, 0, 0), (leaving, 7, 0), (hanging,)) == (7, [0, 7, -9])


def test_a_rank_that_was_killed_is_told_as_a_shell_tells_it(monkeypatch):
    monkeypatch.setattr(process, "GRACE", 0.3)
    assert first((hanging, signal.SIGTERM), (hanging,)) == (143, [-15, -9])


def test_ranks_that_stop_together_are_left_alone():
    assert first((leaving, 75, 0), (leaving, 75, 0.1)) == (75, [75, 75])
    assert first((leaving, 0, 0), (leaving, 0, 0.1)) == (0, [0, 0])


def test_a_rank_that_hangs_at_its_end_is_not_waited_for_for_ever(monkeypatch):
    monkeypatch.setattr(process, "TEAR_DOWN", 0.3)
    assert first((leaving, 0, 0), (hanging,)) == (137, [0, -9])


ENVIRONMENT = """
import os, sys, types
from pathlib import Path
from trainer import __main__ as program

def begin(_):
    for name in program.COMPILED:
        mode = Path(os.environ[name]).stat().st_mode & 0o777
        print(os.environ[name], oct(mode))

sys.modules["trainer.process"] = types.SimpleNamespace(begin=begin)  # it would import torch
program.main(["--data", "d"])
"""


def caches(home, **more):
    """Where a process with this home keeps what it compiles, and who may enter there."""
    env = {**os.environ, "HOME": str(home), **more}
    for name in ("XDG_CACHE_HOME", *program.COMPILED):
        env.pop(name, None) if name not in more else None
    argv = [sys.executable, "-c", ENVIRONMENT]
    made = subprocess.run(argv, env=env, capture_output=True, text=True, check=True)
    return [line.split() for line in made.stdout.splitlines()]


def planted(path):
    path.mkdir()
    os.chown(path, 65534, -1)


@pytest.mark.parametrize("before", [None, Path.mkdir], ids=["none", "open to all"])
def test_no_other_user_can_plant_compiled_code(tmp_path, before):
    """torch.compile loads pickles from a folder that is by default in /tmp, by a known name."""
    folder = tmp_path / ".cache/tandem/inductor"
    if before:
        folder.parent.mkdir(parents=True)
        before(folder)
        folder.chmod(0o777)
    assert caches(tmp_path) == [[str(folder.with_name(n)), "0o700"] for n in ("inductor", "triton")]


def test_no_header_is_compiled_among_the_temporary_files():
    """torch keeps those in /tmp by a known name, whichever folder its other files go to."""
    pytest.importorskip("torch._inductor.config", reason="torch 1.12 compiles nothing")
    code = (
        "from trainer import __main__ as p; p.keep_compiled_code(); import torch._inductor.config"
    )
    asked = "print(getattr(torch._inductor.config, 'cpp_cache_precompile_headers', False))"
    argv = [sys.executable, "-c", f"{code} as _; import torch; {asked}"]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


OTHERS = {
    "another user's": planted,
    "a link": lambda path: path.symlink_to("/tmp"),
    "a file": Path.touch,
}


@pytest.mark.skipif(os.getuid() != 0, reason="needs a second user")
@pytest.mark.parametrize("plant", OTHERS.values(), ids=OTHERS)
def test_where_the_folder_is_not_ours_a_new_one_is_used(tmp_path, plant):
    folder = tmp_path / ".cache/tandem/inductor"
    folder.parent.mkdir(parents=True)
    plant(folder)
    (inductor, mode), (triton, _) = caches(tmp_path, TMPDIR=str(tmp_path))
    assert Path(inductor).parent == tmp_path and mode == "0o700"
    assert Path(triton) == folder.with_name("triton")


def test_a_folder_for_compiled_code_that_the_user_names_stays(tmp_path):
    named = {name: str(tmp_path) for name in program.COMPILED}
    assert [path for path, _ in caches(tmp_path, **named)] == [str(tmp_path)] * 2
