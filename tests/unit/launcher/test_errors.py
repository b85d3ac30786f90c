"""The error that is quoted of what a rank printed. The texts have the shapes of public reports."""

import os

import pytest

from launcher.node import workers
from launcher.node.errors import describe_ending, lines_of

TRACE = 'Traceback (most recent call last):\n  File "t.py", line 3, in main\n    work()\n'
BROKEN = "ValueError: sample 3 is broken"
PLAIN = f"{TRACE}{BROKEN}\n"
MARKED = "".join(f"[rank1]: {line}\n" for line in PLAIN.splitlines())
CHAINED = "\nThe above exception was the direct cause of the following exception:\n\n"
IGNORED = "3%|3    | 3/100 [00:01<00:40]Exception ignored in: <function Iter.__del__ at 0x7f>\n"
FAREWELL = f"""[rank1]:[W1129 09:09:32.031 ProcessGroupNCCL.cpp:1496] Warning: WARNING: no destroy
/usr/lib/resource_tracker.py:216: UserWarning: resource_tracker: 6 leaked objects
  warnings.warn('resource_tracker')
\x1b[34mwandb\x1b[0m: Run summary:
[rank: 1] Child process with PID 652 terminated with code 1. Forcefully terminating all others
{IGNORED}{TRACE}AssertionError: can only test a child process
"""
GROUP = """  + Exception Group Traceback (most recent call last):
  |   File "t.py", line 5, in <module>
  | ExceptionGroup: 2 shards failed (2 sub-exceptions)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "t.py", line 4, in read
    | ValueError: shard 3: bad magic
    +---------------- 2 ----------------
    | OSError: shard 5: short
    +------------------------------------
"""
BOX = """╭──── Traceback (most recent call last) ─────╮
│ /src/t.py:7 in f                           │
│ ╭──────────────── locals ────────────────╮ │
│ │ text = 'ValueError: none of this'      │ │
│ ╰────────────────────────────────────────╯ │
╰────────────────────────────────────────────╯
ValueError: embed_dim 64 must be divisible by
num_heads 6 in
/data/a/very/long/path/that/is/cut/where/the/l
ine/ends/x.yaml
"""
LOGURU = """2026-11-29 09:35:20 | ERROR    | __main__:<module>:11 - An error has been caught
Traceback (most recent call last):

> File "t.py", line 10, in main
    labels(y)
    │      └ array([[ 0,  1],
    │               [10, 11]])
    └ <function labels at 0x7fb305b704a0>

ValueError: label 7 is not in [0, 2)
"""
# Of ultralytics and accelerate: a launcher that the script starts fails after its ranks have.
NESTED = f"""  3%|3     | 3/100 [00:01<00:40,  2.4it/s]{TRACE}torch.OutOfMemoryError: 20 MiB

E0507 10:15:21.451000 12181 torch/distributed/elastic/multiprocessing/api.py:874] failed
{TRACE}torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
==========================
train.py FAILED
{TRACE}subprocess.CalledProcessError: Command '['python']' returned non-zero exit status 1.
"""
SHAPES = {
    "plain": (PLAIN, BROKEN),
    "marked": (MARKED, BROKEN),
    "chained": (PLAIN + CHAINED + TRACE + "t.MyError: no data\n", "t.MyError: no data"),
    "empty line": (TRACE + "RuntimeError: \n  no guard\n", "RuntimeError: no guard"),
    "syntax": ('  File "t.py", line 2\n    f(\n     ^\nSyntaxError: no\n', "SyntaxError: no"),
    "loader": (f"{TRACE}ValueError: Caught ValueError in DataLoader\nOriginal {PLAIN}", BROKEN),
    "spawned": (
        f"{TRACE}torch.multiprocessing.spawn.ProcessRaisedException: \n\n"
        f"-- Process 0 terminated with the following error:\n{PLAIN}",
        BROKEN,
    ),
    "pool": (f'joblib._RemoteTraceback: \n"""\n{PLAIN}"""\n{CHAINED}{PLAIN}', BROKEN),
    "group": (
        GROUP,
        "ExceptionGroup: 2 shards failed (2 sub-exceptions): ValueError: shard 3: bad magic",
    ),
    "rich": (
        BOX,
        "ValueError: embed_dim 64 must be divisible by num_heads 6 in "
        "/data/a/very/long/path/that/is/cut/where/the/line/ends/x.yaml",
    ),
    "loguru": (LOGURU, "ValueError: label 7 is not in [0, 2)"),
    "a launcher within": (NESTED, "torch.OutOfMemoryError: 20 MiB"),
}


def ending_of(stdout, stderr, failed=True):
    """Each stream is printed at once, or [(when, text)]."""
    streams = [[(0.0, text)] if isinstance(text, str) else text for text in (stdout, stderr)]
    pieces = [[(time, text.encode()) for time, text in stream] for stream in streams]
    return describe_ending([*map(lines_of, pieces)], failed)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("failed", [True, False])
def test_the_error_is_quoted_whatever_shape_it_has_and_whatever_libraries_add(name, failed):
    text, quote = SHAPES[name]
    for streams in ((text + FAREWELL, ""), (FAREWELL, text), ("epoch 3\n", FAREWELL + text)):
        exception, _, last_line = ending_of(*streams, failed)
        assert (exception, last_line) == (quote, None)


def test_what_belongs_to_an_error_goes_with_it():
    text = TRACE + "RuntimeError: Error(s) in loading:\n\tMissing key(s)\n" + FAREWELL
    assert ending_of("", PLAIN + CHAINED + text)[1] == ["\tMissing key(s)", BROKEN]


HANDLED, DONE = [(0.0, PLAIN)], [(1.0, "done\n")]


@pytest.mark.parametrize(
    ("stdout", "stderr", "failed", "quote", "last_line"),
    [
        # It was handled if the rank went on and ended with 0; else perhaps not.
        (DONE, HANDLED, False, None, None),
        (DONE, HANDLED, True, BROKEN, "done"),
        ("", [*HANDLED, (1.0, "x\n" * 99)], True, BROKEN, "x"),
        ("", [(0.0, MARKED), (1.0, "x\n" * 99)], True, BROKEN, None),
        ("", IGNORED + PLAIN, False, None, None),
        # Last words.
        ("epoch\n", "usage: t.py\nt.py: error: no x\n", True, None, "t.py: error: no x"),
        ("epoch\n", "val is empty\n" + FAREWELL, True, None, "val is empty"),
        ("", "FATAL Flags: no x\nPass --help to see help.\n", True, None, "FATAL Flags: no x"),
        ("", "╭─ Error ─╮\n│ no x │\n╰─────────╯\n", True, None, "no x"),
    ],
)
def test_what_follows_an_error_or_stands_alone(stdout, stderr, failed, quote, last_line):
    exception, _, last = ending_of(stdout, stderr, failed)
    assert (exception, last) == (quote, last_line)


@pytest.mark.parametrize("size", [1, 1000])
def test_of_endless_output_little_is_kept(size):
    stream = workers.Stream(0, "stderr")
    for _ in range(9000):
        os.write(stream.writer, b"x" * size)
        assert stream.read()
    kept = sum(len(data) for _, data in stream.pieces)
    assert kept == stream.tail_bytes <= workers.TAIL_BYTES
    assert len(stream.pieces) <= workers.TAIL_PIECES
    os.close(stream.reader), os.close(stream.writer)
