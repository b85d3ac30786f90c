"""The live screen: what is on it, and that no machine can fill it with anything else."""

import contextlib
import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launcher import folders, top
from launcher.machines.engines.local import LocalProcess
from launcher.top import PIECE, Idle, Top, fitting
from tests.unit.launcher.launcher_values import host
from tests.unit.launcher.test_progress import RUN, begun, line

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "RUNS", tmp_path)
    folder = tmp_path / RUN
    (folder / "nodes/node1").mkdir(parents=True)
    (folder / "plan.json").write_text("{}")
    (folder / "controller.log").write_text("first\n\x1b]0;owned\x07second\n")
    lines = [begun(), line(time.time(), 20, world_size=1)]
    text = "".join(f"{json.dumps(one)}\n" for one in lines)
    (folder / "nodes/node1/digest.jsonl").write_text(text)
    return folder


@pytest.mark.parametrize(("width", "height"), [(80, 24), (160, 50), (40, 5)])
def test_a_run_fits_the_screen(run, width, height):
    view = Top(run.name, "inventory.ini")
    found = view.lines(width, height)
    assert len(found) <= height and max(map(len, found)) <= width
    assert "epoch 1 of 4, step 20 of 400" in found[2]
    if height > 20:
        assert found[-1] == "  second"


def test_what_is_under_way_is_shown_without_a_name(run, monkeypatch):
    monkeypatch.setattr(top, "Machines", lambda hosts: pytest.fail("asked machines"))
    held = folders.lock(run)
    assert RUN in Top(None, "inventory.ini").lines(80, 24)[1]
    held.close()


def test_what_does_not_fit_is_counted():
    assert fitting(["a"] * 9, 80, 4) == [
        "a",
        "a",
        "a",
        "  ... 6 lines more: make the window taller",
    ]
    assert fitting(["\x1b[2Jab\x07c"], 2, 1) == ["ab"]


GOOD = '{"cpu": 50.0, "memory": 40.0, "swap": 0, "card": [5000000, 2000000, 0, 3]}'


@pytest.mark.parametrize(
    ("script", "why"),
    [
        (f"print('welcome'); print('{GOOD}')", ""),
        ("print('{\"cpu\": NaN}')", "it sends what is no figure"),
        ("print('{\"cpu\": 1e400}')", "it sends what is no figure"),
        ("print('{\"gpus\": [[]]}')", "it sends what is no figure"),
        ("print('{' * 100000)", "it sends what is no figure"),
        ("print('x' * (1 << 20), end='')", "it sends what is no figure"),
        ("print('{', flush=True); sys.exit()", "it sends what is no figure"),
        ("sys.exit()", "its connection ended"),
    ],
)
def test_what_a_machine_tells_is_not_trusted(script, why):
    process = LocalProcess([sys.executable, "-c", f"import sys, time; {script}\ntime.sleep(60)"])
    one = Idle(host(1), process)
    try:
        while one.figures is None and not one.why:
            select.select([process], [], [], 5)
            one.look()
            assert len(one._rest) < 2 * PIECE
        assert one.why == why
        if not why:
            assert (one.figures.cpu, one.figures.sent, one.figures.dropped) == (50.0, 2e6, 3)
    finally:
        process.close()


def test_machines_that_run_nothing_are_asked(tmp_path):
    """By the whole way: the program that is sent, and what it prints."""
    machines = top.Machines([host(1, connection="local", address="127.0.0.1")])
    try:
        (one,) = machines._idle
        while one.figures is None and not one.why:
            select.select([one.process], [], [], 5)
            one.look()
        assert one.figures and 0 <= one.figures.cpu <= 100 and one.figures.memory > 0, one.why
        assert machines.lines(80)[0] == "  1 machine; no run is under way here"
    finally:
        machines.close()


def test_a_live_screen_leaves_the_terminal_as_it_was(run):
    code = (
        "import sys; from pathlib import Path; from launcher import folders, top\n"
        f"folders.RUNS = Path({str(run.parent)!r}); sys.exit(top.top({run.name!r}, 'x'))"
    )
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        os.execv(sys.executable, [sys.executable, "-c", code])
    said = b""
    while b"step 20 of 400" not in said:
        said += os.read(terminal, 4096)
    os.write(terminal, b"q")
    with contextlib.suppress(OSError):  # at the end of the child
        while True:
            said += os.read(terminal, 4096)
    _, result = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(result) == 0
    assert said.startswith(top.ENTER.encode()) and said.endswith(top.LEAVE.encode())


def test_where_there_is_no_terminal_it_is_printed_once(run):
    code = (
        "import sys; from pathlib import Path; from launcher import folders, top\n"
        f"folders.RUNS = Path({str(run.parent)!r}); sys.exit(top.top({run.name!r}, 'x'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "step 20 of 400" in done.stdout and not re.search("\x1b", done.stdout)


def test_why_a_machine_does_not_answer_is_told_whole(monkeypatch):
    monkeypatch.setattr(top.engine, "open_all", lambda hosts: ({}, {"b": "b " * 60, "a": "a: x"}))
    machines = top.Machines([host(1)])
    assert machines.lines(40)[2] == "  a: x"
    assert " ".join(machines.lines(40)[3:]).split() == ["b"] * 60
    assert all(len(line) <= 40 for line in machines.lines(40))
