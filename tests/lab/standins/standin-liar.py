#!/usr/bin/env python3
"""Stands in for a machine that lies to the control node, in the one way that /opt/standin/lie
names. It is called in the place of what the launcher calls there: the guard (the real one runs
beneath it, and what that says is passed on until the lie), the look before a run, and the command
by which files are collected. Standard library only.
"""

import json
import os
import pathlib
import subprocess
import sys
import threading

PYTHON, HONEST = "/usr/bin/python3.11", "/opt/standin/honest"
LIE = pathlib.Path("/opt/standin/lie").read_text().strip()
PRECIOUS = pathlib.Path("/opt/standin/precious")  # names a file of the control node
ESCAPES = "\x1b]0;owned\x07\x1b]52;c;cm0gLXJm\x1b\\\x1b[2J\x9b6n\x1b[31mred"
WORKER = {"exit_code": 1, "signal": None, "exception": "E: x"}
EXIT = {
    "type": "exit", "reason": "finished", "message": None, "exit_code": 0, "signal": None,
    "mono_start": 0.0, "mono_end": 1.0, "workers": {}, "ended": [], "left": [],
}  # fmt: skip
OVER = threading.Event()  # the control node has hung up
TURN = threading.Lock()  # a frame is written as a whole
STEPS = "rank1.1.steps.jsonl"


def out(data):
    """Bytes to the control node; once it has hung up they go nowhere."""
    try:
        with TURN:
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
    except OSError:
        OVER.set()


def say(payload=b"", **frame):
    out(json.dumps(frame).encode() + b"\n" + payload)


def log(data, rank=1):
    say(data, type="log", rank=rank, stream="stdout", bytes=len(data))


def drip():
    """A byte a second, for ever."""
    while not OVER.wait(1):
        out(b"x")


def odd_lines(_):
    """Lines that are no frames, and then the end."""
    out(b"[" * 500_000 + b'\n\xff\xfe\n{"type": "\xff"}\n')
    out(b'["exit"]\n"exit"\nnull\n7\n{"no": "type"}\n')
    os._exit(0)


def escapes(_):
    """Text for a terminal to obey, in all that is shown."""
    log(f"said {ESCAPES}\n".encode())
    say(type="trouble", what="disk", message=f"trouble {ESCAPES}")
    say(**{**EXIT, "reason": "failed", "message": f"launch {ESCAPES}", "exit_code": 1})
    os._exit(0)


def record(task, data, name=STEPS, skipped=0):
    """The next piece of a record, or one that leaves so many bytes out."""
    at = task["ends"].get(name, 0) + skipped
    task["ends"][name] = at + len(data)
    say(data, type="record", file=name, offset=at, bytes=len(data))


# What comes after the third step.
AT_STEP = {
    "a path for a record": lambda task: record(task, b"x\n", "../../../../.bashrc"),
    "a piece that comes twice": lambda task: [record(task, b"x\n", skipped=n) for n in (0, -2)],
    "lines that are no frames": odd_lines,
    "a path for a rank": lambda _: log(b"x\n", rank="../../../../.bashrc"),
    "an exit of another host": lambda _: say(
        **{**EXIT, "reason": "failed", "host": "node1", "workers": {"0": WORKER}, "exit_code": 1}
    ),
    "finished while it trains": lambda _: say(**EXIT),
    "escapes": escapes,
    # Files are planted, and the attempt fails by a worker's end.
    "links": lambda task: (links(task), os.kill(task["worker"], 9)),
}


def put(folder, names, make):
    """Something else in the place of these files."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["rm", "-rf", "--", str(path)], check=True)
        make(path)


def links(task):
    """Every name that is collected, or written to on the control node, leads to a file there."""
    target = PRECIOUS.read_text().strip()
    names = ("machine.2.jsonl", "rank1.log", "rank1.1.steps.jsonl", "launch.log")
    put(task["nodes"], names, lambda path: path.symlink_to(target))
    put(task["output"], ["samples/rank1.1.csv"], lambda path: path.symlink_to(target))


def specials(task):
    """A FIFO and a device."""
    put(task["nodes"], ["machine.1.jsonl"], os.mkfifo)
    make = ["sudo", "-n", "mknod", "-m", "666"]
    rank = ["rank1.1.steps.jsonl"]
    put(task["nodes"], rank, lambda path: subprocess.run([*make, path, "c", "1", "5"]))


# What becomes of its files when its part has ended well.
AT_END = {"specials": specials}


def changed(**fields):
    return lambda facts: json.dumps({**facts, **fields})


# What it says of itself before a run.
ANSWERS = {
    "an answer of wrong types": changed(cores="eight"),
    "a home of two lines": changed(home="/home/tandem\n/etc"),
    "a holder with escapes": changed(
        runs=[{"pid": 1, "run": ESCAPES, "holder": ESCAPES, "seconds": 9}]
    ),
    "an answer without end": lambda _: "y" * (16 << 20),
}


def frames(stream):
    """What the real guard says: each frame, its line as it came, and the bytes that follow it."""
    while line := stream.readline():
        frame = json.loads(line) if line.startswith(b"{") else {}
        yield frame, line, stream.read(frame.get("bytes", 0))


def pass_on(stream):
    """Orders to the real guard. The end of them ends it, too."""
    while line := sys.stdin.buffer.readline():
        stream.write(line)
        stream.flush()
    OVER.set()
    stream.close()


def guard(words):
    first = sys.stdin.buffer.readline()
    if LIE == "says nothing and drips":
        threading.Thread(target=lambda: (sys.stdin.buffer.read(), OVER.set()), daemon=True).start()
        return drip()
    told = json.loads(first)
    task = {"output": pathlib.Path.home() / told["output"]}
    task["nodes"] = task["output"] / "nodes" / told["host"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    real = subprocess.Popen([PYTHON, *words], **pipes)
    real.stdin.write(first)
    real.stdin.flush()
    threading.Thread(target=pass_on, args=[real.stdin], daemon=True).start()
    printed = b""  # of the rank; a line may come in two frames
    task["ends"] = {}  # of its records
    for frame, line, data in frames(real.stdout):
        if frame.get("type") == "record":
            task["ends"][frame["file"]] = frame["offset"] + len(data)
        if frame.get("type") == "worker":
            task["worker"] = frame["pid"]
        if frame.get("type") == "exit" and LIE in AT_END:
            AT_END[LIE](task)
        out(line + data)
        if frame.get("type") != "log":
            continue
        before, printed = printed, (printed + data)[-1000:]
        if b"step 3\n" in before + data and b"step 3\n" not in before and LIE in AT_STEP:
            AT_STEP[LIE](task)
            if LIE != "links":
                break
    real.stdout.read()


def answer(words):
    """The look before a run, as the honest environment makes it, then changed."""
    if LIE not in ANSWERS:
        os.execv(HONEST, [HONEST, *words])
    said = subprocess.run([HONEST, *words], stdin=sys.stdin, stdout=subprocess.PIPE).stdout
    mark, _, facts = said.decode().partition(" ")
    if mark == "tandem-answer" and facts.startswith("{"):  # not which machines it reaches
        said = f"{mark} {ANSWERS[LIE](json.loads(facts))}\n".encode()
    out(said)


def main(tool, words):
    if tool == "guard":
        guard(words)
    elif tool == "answer":
        answer(words)
    elif LIE == "files by drips":
        # Of the file that is asked for not a byte is right, but for the mark before it.
        drip()
    else:
        os.execv("/usr/bin/head", ["head", *words])


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
