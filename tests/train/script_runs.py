"""Runs of a script of one's own on two nodes of this machine, as `make train SCRIPT=...` starts
them."""

import atexit
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from contextlib import contextmanager
from pathlib import Path

OURS = Path(__file__).resolve().parents[2]


def copy_of_checkout():
    """For the tests of this process, which leave the user's runs/ as it was."""
    parent = tempfile.mkdtemp(prefix="tandem-tests-")
    atexit.register(shutil.rmtree, parent, ignore_errors=True)
    copy = Path(parent, "checkout")
    kept = {path.name for path in OURS.iterdir() if not path.name.startswith(".")}
    kept -= {"data", "runs", "bundle"}

    def ignored(folder, names):
        return {"__pycache__"} if Path(folder) != OURS else {*names} - kept

    shutil.copytree(OURS, copy, ignore=ignored)
    for name in (".venv", "data"):
        if (OURS / name).exists():
            (copy / name).symlink_to(OURS / name)
    return copy


CHECKOUT = copy_of_checkout()
EXAMPLE = CHECKOUT / "examples/own_script/train.py"  # whose folder is sent alone
# QUEUE: somebody may try the demo on this machine.
TRAIN = [sys.executable, "-m", "launcher", "train", "--inventory", "examples/demo.ini", "--queue"]
STARTED = []
PATIENCE = 300  # seconds; far more than anything here takes


def start(script, *words, arguments=()):
    return begin([*TRAIN, "--nodes=2", f"--script={script}", *words, "--", *arguments])


def begin(argv):
    STARTED.append(subprocess.Popen(
        argv, cwd=CHECKOUT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    ))  # fmt: skip
    return STARTED[-1]


@contextmanager
def in_time(process):
    """A process that never says or ends what is expected of it is a failure, not a hang: the tests
    after it would wait for its machines. Gives a function that begins the time anew."""
    clocks = []

    def begin():
        while clocks:
            clocks.pop().cancel()
        clocks.append(threading.Timer(PATIENCE, process.kill))
        clocks[0].start()

    begin()
    try:
        yield begin
    finally:
        clocks[0].cancel()


def lines_of(process):
    """Its lines as they come."""
    with in_time(process) as begin_anew:
        for line in process.stdout:
            if line.startswith("tandem: waiting"):  # for machines that somebody else's run has
                begin_anew()
            yield line
        process.wait()


def ended(process):
    """What it said, its exit code and its folder; None where no run began."""
    said = "".join(lines_of(process))
    # Of a run that found its machines taken in the same second nothing is left: it began again.
    names = re.findall(r"^tandem: run (\S+), attempt", said, re.M)
    return said, process.returncode, CHECKOUT / "runs" / names[-1] if names else None


def train(script, *words, **more):
    return ended(start(script, *words, **more))


def until_it_says(process, words):
    """Read its lines up to one that has these words."""
    said = []
    for line in lines_of(process):
        said.append(line)
        if words in line:
            return line
    raise AssertionError(f"it ended without saying {words!r}: {''.join(said)}")


def left(mark):
    """The processes that have this text in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (path / "environ").read_bytes():
                found.append(int(path.name))
        except OSError:
            continue
    return found
