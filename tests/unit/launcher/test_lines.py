"""What the ranks print: order, whole lines, the live bar."""

import io

import pytest

from launcher.terminal import Terminal
from launcher.watch.lines import LINE_PIECE_BYTES, SHOWN_CHARACTERS, Assembler, RunLogs


class Screen(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("size", [1, 1000])
def test_lines_do_not_depend_on_the_pieces(size):
    assembler, lines = Assembler(), []
    wire = b"one\r\n 10%\r 20%\r100%\ntwo\n\nlast"
    for start in range(0, len(wire), size):
        lines += assembler.feed(wire[start : start + size])[0]
    assert lines == ["one", "100%", "two", ""]
    assert assembler.take_rest() == "last"


@pytest.mark.parametrize("size", [1000, 3 * LINE_PIECE_BYTES])
def test_a_long_line_is_cut_and_nothing_of_it_is_lost(size):
    text = "é¤€a" * LINE_PIECE_BYTES
    wire = (text + "\nnext\n").encode()
    assembler, lines = Assembler(), []
    for start in range(0, len(wire), size):
        lines += assembler.feed(wire[start : start + size])[0]
        assert len(assembler._buffer) <= LINE_PIECE_BYTES  # without a newline, too
    assert "".join(lines) == text + "next" and lines[-1] == "next"
    assert max(len(line.encode()) for line in lines) <= LINE_PIECE_BYTES


def test_of_a_long_line_the_beginning_is_shown_and_the_log_has_all(tmp_path):
    screen = io.StringIO()
    logs = RunLogs(tmp_path, Terminal(screen), 1)
    logs.feed("node1", 0, "stdout", b"x" * 5000 + b"\n")
    logs.close()
    assert (tmp_path / "nodes/node1/rank0.log").read_text() == "x" * 5000 + "\n"
    cut = "x" * SHOWN_CHARACTERS + " ... (904 more characters in the log)"
    assert screen.getvalue() == f"[node1 0] {cut}\n"
    assert list(logs.get_log("node1", 0).last_lines) == [cut]


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


def test_a_bar_that_was_taken_away_is_no_last_line(tmp_path):
    screen = io.StringIO()  # no terminal: it gets no bar
    logs = RunLogs(tmp_path, Terminal(screen), 1)
    logs.feed("node1", 0, "stderr", b"epoch 8\n\r 10%\r        \r")
    logs.close()
    assert (tmp_path / "nodes/node1/rank0.log").read_text() == "epoch 8\n"
    assert screen.getvalue() == "[node1 0] epoch 8\n"


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
