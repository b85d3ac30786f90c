"""The live screen: what is on it, and that no machine can fill it with anything else."""

import contextlib
import json
import os
import pty
import select
import subprocess
import sys
from pathlib import Path

import pytest

from contract.errors import UserError
from launcher import folders, top
from launcher.top import TURN_BYTES, IdleMachine, Top
from report.figures import CPU, DROPPED, MEMORY, SENT
from tests.unit.launcher.launcher_values import host
from tests.unit.report.report_runs import BOTTLENECKS, RunBuilder

ROOT = Path(__file__).resolve().parents[3]
RUN = "20261122T142755Z-resnet50-1n"


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "RUNS", tmp_path)
    folder = tmp_path / RUN
    builder = RunBuilder(folder, nodes=1, steps=400, epochs=4)
    builder.write_control()
    builder.write_rank(0, "node1", steps=20, end=False)
    builder.write_machine(0, "node1")
    (folder / "controller.log").write_text("first\n\x1b]0;owned\x07second\n")
    return folder


@pytest.mark.parametrize(("width", "height"), [(80, 24), (40, 5)])
def test_a_run_fits_the_screen(run, width, height):
    view = Top(run.name, "inventory.ini")
    found = view.lines(width, height)
    assert len(found) <= height and max(map(len, found)) <= width
    assert "epoch 1 of 4, step 20 of 400" in found[2]
    assert found[-1] == "  second" if height > 20 else "more lines: make the" in found[-1]


def test_what_is_under_way_is_shown_without_a_name(run, monkeypatch):
    monkeypatch.setattr(top, "IdleMachines", lambda hosts: pytest.fail("asked machines"))
    held = folders.lock(run)
    assert RUN in Top(None, "inventory.ini").lines(80, 24)[1]
    held.close()


def test_the_row_of_a_machine_that_others_wait_for_stands_out(run):
    RunBuilder(run, **BOTTLENECKS["straggler"]).write()
    held = folders.lock(run)
    view = Top(run.name, "inventory.ini")
    found = view.draw(80, 60).renderables
    held.close()
    coloured = {line.plain.split()[0] for line in found if line.style}
    assert coloured == view._slow and len(coloured) == 1


# Ten seconds of four processors, in five; as launcher.node.records prints them.
GOOD = "".join(
    json.dumps(
        {"kind": "sample", "mono": mono, "cores": 4, "cpu_busy": 2.0 * mono}
        | {"card": {"tx_bytes": int(2e6 * mono), "rx_dropped": int(3 * mono), "tx_dropped": 0}}
    )
    + "\n"
    for mono in (20, 25)
)


class Sends:
    """A process that has sent this, and goes on; or has ended."""

    def __init__(self, text, ended=False):
        data = text.encode()
        self.pieces = [data[at : at + 1000] for at in range(0, len(data), 1000)]
        self.pieces += [b""] * ended

    def read(self):
        return self.pieces.pop(0) if self.pieces else None


def looked(text, ended=False):
    one = IdleMachine(host(1), Sends(text, ended))
    while one.process.pieces and not one.problem:
        one.look()
        assert len(one._unread) < 2 * TURN_BYTES
    return one


def test_figures_are_read_between_other_lines_and_an_end_is_told():
    now = looked(f"welcome\n[]\n{GOOD}").row
    assert [now.figures[of] for of in (CPU, SENT, DROPPED)] == [0.5, 2e6, 3]
    assert looked("x" * (1 << 20)).problem == "it sends a line without an end"
    assert (
        looked(GOOD, ended=True).problem
        == looked("{", ended=True).problem
        == "its connection ended"
    )


def test_machines_that_run_nothing_are_asked(tmp_path):
    """By the whole way: the program that is sent, and what it prints."""
    machines = top.IdleMachines([host(1, connection="local", address="127.0.0.1")])
    try:
        (one,) = machines._idle
        while not (one.row and one.row.figures.get(CPU)) and not one.problem:
            select.select([one.process], [], [], 5)
            one.look()
        assert 0 <= one.row.figures[CPU] <= 1 and one.row.figures[MEMORY] > 0, one.problem
        assert machines.lines(80)[0] == "  1 machine; no run is active"
    finally:
        machines.close()


class Breaks:
    """A machine whose sshd closes: when a command is started or read."""

    def __init__(self, machine, place):
        self.host, self.place = machine, place

    def start(self, argv):
        self.fail("start")
        return self

    def write(self, data):
        return len(data)

    def read(self):
        self.fail("read")

    def fail(self, place):
        if place == self.place:
            raise {"start": UserError, "read": KeyError}[place](place)

    def close_stdin(self):
        pass

    close = close_stdin


@pytest.mark.parametrize("place", ["start", "read"])
def test_one_machine_that_closes_hides_no_others(monkeypatch, place):
    nodes = {f"node{n}": Breaks(host(n), place if n == 1 else "") for n in (1, 2)}
    monkeypatch.setattr(top.engine, "open_all", lambda hosts: (nodes, {}))
    machines = top.IdleMachines([node.host for node in nodes.values()])
    said = "\n".join(machines.lines(80))
    assert "node1 (192.0.2.1): it does not answer: " in said and "2 machines" in said
    assert [one.host.name for one in machines._idle] == ["node2"]
    machines.close()


@pytest.fixture
def argv(run):
    """What shows the run."""
    code = (
        "import sys; from pathlib import Path; from launcher import folders, top\n"
        f"folders.RUNS = Path({str(run.parent)!r}); sys.exit(top.top({run.name!r}, 'x'))"
    )
    return [sys.executable, "-c", code]


def test_a_live_screen_leaves_the_terminal_as_it_was(argv):
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        os.execve(sys.executable, argv, {**os.environ, "TERM": "xterm"})
    said = b""
    while b"step 20 of 400" not in said:
        said += os.read(terminal, 4096)
    os.write(terminal, b"q")
    with contextlib.suppress(OSError):  # at the end of the child
        while True:
            said += os.read(terminal, 4096)
    _, result = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(result) == 0
    # A screen of its own without a cursor; then the screen of before, and the cursor.
    assert said.startswith(b"\x1b[?1049h") and b"\x1b[?25l" in said
    assert said.rindex(b"\x1b[?1049l") > said.rindex(b"step 20 of 400")
    assert said.rindex(b"\x1b[?25h") > said.rindex(b"\x1b[?25l")


def test_where_there_is_no_terminal_it_is_printed_once(argv):
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "step 20 of 400" in done.stdout and "\x1b" not in done.stdout


def test_why_a_machine_does_not_answer_is_told_whole(monkeypatch):
    monkeypatch.setattr(top.engine, "open_all", lambda hosts: ({}, {"b": "b " * 60, "a": "a: x"}))
    machines = top.IdleMachines([host(1)])
    assert machines.lines(40)[2] == "  a: x"
    assert " ".join(machines.lines(40)[3:]).split() == ["b"] * 60
    assert all(len(line) <= 40 for line in machines.lines(40))
