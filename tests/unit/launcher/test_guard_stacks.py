"""A guard asks silent ranks where they stand; the readers of a run name the place in their code."""

import json
import os
import re
import subprocess
import sys
import time

from boundary.run_files import SilentRank
from boundary.schema import convert_what_fits
from launcher.node import stacks
from report.hang import describe_place
from tests.unit.launcher.guard_client import Client, workers

RANKS = """
import ctypes, faulthandler, mmap, os, signal, struct, sys, time

def compute_for_ever():
    while True: pass

def wait_in_a_call():
    os.read(os.pipe()[0], 1)  # in C, as a collective

def stopped():
    os.kill(os.getpid(), signal.SIGSTOP)

def deaf():
    faulthandler.unregister(signal.SIGRTMIN + 9)
    time.sleep(600)

def wait_in_the_kernel():
    # A process waits so for a child that has not replaced its program yet, by vfork.
    if ctypes.CDLL(None).syscall(56, 0x4000 | signal.SIGCHLD, 0, 0, 0, 0) == 0:
        time.sleep(600)

def count(entered):  # as tandem/sums.py
    with open(os.environ["TANDEM_SUMS"], "r+b") as file:
        counts = struct.pack("=8q", os.getpid(), entered, 2, 9, 1, time.monotonic_ns(), -1, -1)
        mmap.mmap(file.fileno(), 64)[:] = counts

rank = int(os.environ["RANK"])
os.nice(19)  # who computes for ever takes no time from others
if rank:
    count(40 + rank)
[compute_for_ever, wait_in_a_call, stopped, deaf, wait_in_the_kernel][rank]()
"""


def test_each_silent_rank_says_where_it_is_and_what_it_has_counted(tmp_path):
    script = tmp_path / "src/train.py"
    script.parent.mkdir()
    script.write_text(RANKS)
    client = Client()
    run = f"exec(compile(open({str(script)!r}).read(), {str(script)!r}, 'exec'))"
    task = {"ranks": range(5), "record": True, "ask_after": 1.0, "interface": "lo"}
    try:
        client.start(tmp_path, workers(run, 5), **task)
        while len(entries := newest_stacks(client)) < 5:
            client.wait_for("beat")
            client.send(type="lease")
            client.pump(0.2)
        client.send(type="stop", grace=1)
        ended = client.wait_for("exit")
    finally:
        client.close()
    entries = [convert_what_fits(entries[str(rank)], SilentRank) for rank in range(5)]
    places = [describe_place(entry, "node1") for entry in entries]
    assert re.fullmatch(r"is at src/train.py:5, in compute_for_ever", places[0])
    assert places[1] == "is at src/train.py:8, in wait_in_a_call"
    assert entries[2].state == "T" and entries[2].threads == []
    # It has no handler any more: asking would have ended it by another signal. On a busy machine
    # the guard's SIGKILL may come before the SIGTERM that launch passes on.
    assert entries[3].threads == []
    assert ended["workers"]["3"]["signal"] in ("SIGTERM", "SIGKILL")
    kernel = r"cannot answer: it is in uninterruptible I/O \(state D\); the kernel waits in \w+"
    assert re.fullmatch(kernel, places[4])
    assert [entry.sums.entered for entry in entries] == [None, 41, 42, 43, 44]
    assert (entries[4].sums.bucket, entries[4].sums.queued) == (2, None)


def newest_stacks(client):
    """What each rank answered, by the last line of the record."""
    lines = map(json.loads, client.records.get("machine.1.jsonl", b"").splitlines())
    stacks_of_ranks = [line["ranks"] for line in lines if line["kind"] == "stacks"]
    return stacks_of_ranks[-1] if stacks_of_ranks else {}


THREADED = """
import os, threading

def deep(n):
    return deep(n - 1) if n else 0

def work():
    while True:
        deep(300)

threading.Thread(target=work, daemon=True).start()
print("begun", flush=True)
os.read(0, 1)
os._exit(0)
"""


def test_a_question_harms_no_rank_of_which_another_thread_runs(tmp_path):
    environment = dict(os.environ)
    stacks.let_rank_answer(environment, tmp_path, 0)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    argv = [sys.executable, "-c", THREADED]
    with subprocess.Popen(argv, env=environment, **pipes) as rank:
        rank.stdout.readline()
        for _ in range(400):  # its thread died of it after some tens
            os.kill(rank.pid, stacks.SIGNAL)
            time.sleep(0.0005)
        rank.stdin.close()
        assert rank.wait(30) == 0
    (frames,) = stacks.parse_stacks(stacks.stacks_file(tmp_path, 0).read_text())
    assert frames[0][2] == "<module>"


def test_the_environments_own_sitecustomize_runs_and_nothing_else_sees_ours(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.own = 'seen'\n")
    code = (
        "import os, sys; print(sys.own, os.environ.get('PYTHONPATH'));"
        "print(sys.modules['sitecustomize'].__file__, [p for p in sys.path if 'startup' in p])"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    stacks.let_rank_answer(environment, tmp_path, 0)
    printed = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    own = tmp_path / "sitecustomize.py"
    assert printed.stdout == f"seen {tmp_path}\n{own} []\n" and printed.stderr == ""


def test_an_answer_that_is_still_being_written_is_waited_for(tmp_path, monkeypatch):
    """It comes frame by frame, a library's first."""
    monkeypatch.setattr(stacks, "has_handler", lambda *_: True)
    monkeypatch.setattr(os, "kill", lambda *_: None)
    question = stacks.Question(tmp_path / "0", os.getpid(), 0.0, 0.0, {})
    with (tmp_path / "0").open("w") as file:
        for line in ('  File "torch.py", line 1 in sum\n', '  File "train.py", line 2 in wait\n'):
            print(line, end="", file=file, flush=True)
            assert not question.is_settled(1.0)
    assert question.is_settled(1.0) and len(question.threads[0]) == 2
