"""What the ranks print: order, whole lines, the live bar."""

import io

import pytest

from launcher import terminal
from launcher.terminal import Terminal
from launcher.watch.lines import LONGEST, SHOWN, Assembler, RunLogs


class Screen(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_lines_do_not_depend_on_the_pieces(size):
    assembler, lines = Assembler(), []
    wire = b"one\r\n 10%\r 20%\r100%\ntwo\n\nlast"
    for start in range(0, len(wire), size):
        lines += assembler.feed(wire[start : start + size])[0]
    assert lines == ["one", "100%", "two", ""]
    assert assembler.rest() == "last"


def test_output_without_newlines_costs_work_in_proportion(monkeypatch):
    """Dots without line breaks, or a binary dump: what has arrived is not scanned again."""
    held = 0
    assembler = Assembler()
    for _ in range(1000):
        assembler.feed(b"." * 10_000)
        held = max(held, len(assembler._buffer))
    assert held <= LONGEST


@pytest.mark.parametrize("size", [1000, LONGEST - 1, 3 * LONGEST])
def test_a_long_line_is_cut_and_nothing_of_it_is_lost(size):
    text = "é¤€a" * LONGEST
    wire = (text + "\nnext\n").encode()
    assembler, lines = Assembler(), []
    for start in range(0, len(wire), size):
        lines += assembler.feed(wire[start : start + size])[0]
    assert "".join(lines) == text + "next" and lines[-1] == "next"
    assert max(len(line.encode()) for line in lines) <= LONGEST


def test_of_a_long_line_the_beginning_is_shown_and_the_log_has_all(tmp_path):
    screen = io.StringIO()
    logs = RunLogs(tmp_path, Terminal(screen), 1)
    logs.feed("node1", 0, "stdout", b"x" * 5000 + b"\n")
    logs.close()
    assert (tmp_path / "nodes/node1/rank0.log").read_text() == "x" * 5000 + "\n"
    cut = "x" * SHOWN + " ... (904 more characters in the log)"
    assert screen.getvalue() == f"[node1 0] {cut}\n"
    assert list(logs.of("node1", 0).last) == [cut]


def test_terminal_gets_node_and_rank_and_launch_stays_off_it(tmp_path):
    screen = io.StringIO()
    logs = RunLogs(tmp_path, Terminal(screen), 16)
    logs.feed("node1", 3, "stdout", b"hello\n")
    logs.feed("node1", None, "stderr", b"FutureWarning\n")
    logs.close()
    assert screen.getvalue() == "[node1  3] hello\n"
    assert (tmp_path / "nodes/node1/launch.log").read_text() == "FutureWarning\n"


def test_only_rank_0_has_a_live_bar_and_lines_go_above_it(tmp_path):
    screen = Screen()
    logs = RunLogs(tmp_path, Terminal(screen), 2)
    logs.feed("node1", 0, "stderr", b"\r 10%")
    logs.feed("node2", 1, "stderr", b"\r 99%")
    logs.feed("node2", 1, "stdout", b"hello\n")
    logs.feed("node1", 0, "stderr", b"\r 20%")
    text = screen.getvalue()
    assert "99%" not in text
    assert text == (
        "\r\x1b[K[node1 0]  10%\r\x1b[K[node2 1] hello\n[node1 0]  10%\r\x1b[K[node1 0]  20%"
    )
    logs.close()


def test_no_bar_where_there_is_no_terminal(tmp_path):
    screen = io.StringIO()
    logs = RunLogs(tmp_path, Terminal(screen), 1)
    logs.feed("node1", 0, "stderr", b"\r 10%\r 100%\n")
    logs.close()
    assert screen.getvalue() == "[node1 0]  100%\n"


def test_a_bar_that_was_taken_away_is_no_last_line(tmp_path):
    logs = RunLogs(tmp_path, Terminal(io.StringIO()), 1)
    logs.feed("node1", 0, "stderr", b"epoch 8\n\r 10%\r        \r")
    logs.close()
    assert (tmp_path / "nodes/node1/rank0.log").read_text() == "epoch 8\n"


CHAINED = """first
[rank1]: Traceback (most recent call last):
[rank1]:   File "a.py", line 1, in <module>
[rank1]:     f()
[rank1]: ValueError: inner

[rank1]: During handling of the above exception, another exception occurred:

[rank1]: Traceback (most recent call last):
[rank1]:   File "a.py", line 3, in f
[rank1]: RuntimeError: [gloo] Connection closed by peer
frame #0: c10::Error::Error(...) + 0x80 (0x7f libc10.so)
after
"""


def test_of_a_traceback_the_errors_are_shown_and_the_log_has_all(tmp_path):
    kept = [
        "first",
        "[rank1]: ValueError: inner",
        "",
        "[rank1]: During handling of the above exception, another exception occurred:",
        "",
        "[rank1]: RuntimeError: [gloo] Connection closed by peer",
        "after",
    ]
    screen = io.StringIO()
    logs = RunLogs(tmp_path, Terminal(screen), 1)
    for size in (7, 10_000):  # and in pieces
        for start in range(0, len(CHAINED), size):
            logs.feed("node1", 0, "stderr", CHAINED[start : start + size].encode())
    logs.close()
    assert screen.getvalue().splitlines() == [f"[node1 0] {line}" for line in kept] * 2
    assert (tmp_path / "nodes/node1/rank0.log").read_text() == CHAINED * 2


def test_waiting_is_said_after_5_s_and_then_every_15(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now[0])
    screen = io.StringIO()
    waited = terminal.WaitNotice(Terminal(screen), "the processes import torch")
    for second in range(40):
        now[0] = 100.0 + second
        waited.update(f"{second // 10} of 4 have begun")
    assert screen.getvalue().splitlines() == [
        "tandem: the processes import torch: 5 s so far, 0 of 4 have begun",
        "tandem: the processes import torch: 20 s so far, 2 of 4 have begun",
        "tandem: the processes import torch: 35 s so far, 3 of 4 have begun",
    ]
