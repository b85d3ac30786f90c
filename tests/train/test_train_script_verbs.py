"""The verbs for a run under way, of a script of one's own on two nodes of this machine."""

import json
import subprocess
import sys

import pytest

from tests.train.script_runs import CHECKOUT, ended, left, start, until_it_says

pytest.importorskip("fabric", reason="a run needs the control machine's environment")

GOES_ON = """
import time
from torch import distributed
distributed.init_process_group("gloo")
print("it runs as rank", distributed.get_rank(), flush=True)
time.sleep(3600)
"""


def verb(*words):
    return subprocess.run(
        [sys.executable, "-m", "launcher", *words],
        cwd=CHECKOUT, capture_output=True, text=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip


@pytest.fixture
def detached(script):
    """The name of a run that goes on without a terminal."""
    said, code, run = ended(start(script(GOES_ON), "--detach"))
    assert code == 0, said
    assert f"`make attach RUN={run.name}` shows it" in " ".join(said.split())
    view = attached(run.name)
    for _ in range(2):
        until_it_says(view, "it runs as rank")
    view.kill()
    view.communicate()
    yield run.name
    verb("stop", run.name)


def attached(name):
    return subprocess.Popen(
        [sys.executable, "-m", "launcher", "attach", name],
        cwd=CHECKOUT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def test_attach_shows_all_that_was_said_and_ends_with_the_run(detached):
    with attached(detached) as view:
        for _ in range(2):
            until_it_says(view, "it runs as rank")
        assert verb("stop", detached).returncode == 0
        said, code, _ = ended(view)
        assert "stopped" in said and code == 0


def test_status_tells_that_it_runs_and_its_last_lines(detached):
    told = verb("status", detached)
    assert told.returncode == 0, told.stderr
    assert f"run {detached}: running, carried out by process" in told.stdout
    assert "it runs as rank 1" in told.stdout
    assert json.loads(verb("status", detached, "--json").stdout)["state"] == "running"


def test_stop_ends_it_and_leaves_nothing(detached):
    assert len(left(f"runs/{detached}/work")) >= 2
    done = verb("stop", detached)
    assert done.returncode == 0, done.stdout + done.stderr
    assert left(f"runs/{detached}/work") == []
    assert json.loads((CHECKOUT / "runs" / detached / "attempts.json").read_text())["status"] == (
        "stopped"
    )
    again = verb("stop", detached)
    assert again.returncode == 2
    assert f"run {detached} is not under way: it is stopped" in again.stderr


def test_a_queued_one_begins_when_the_machines_are_free(detached, script):
    second = start(script("print('it is its turn')\n"))
    until_it_says(second, "waiting for machines: ")
    assert second.poll() is None
    assert verb("stop", detached).returncode == 0
    said, code, run = ended(second)
    assert code == 0, said
    assert run.name != detached and "it is its turn" in said
