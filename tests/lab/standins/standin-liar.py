#!/usr/bin/env python3
"""Stands in for a machine that lies to the control machine, in the one way that /opt/standin/lie
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
PRECIOUS = pathlib.Path("/opt/standin/precious")  # names a file of the control machine
ESCAPES = "\x1b]0;owned\x07\x1b]52;c;cm0gLXJm\x1b\\\x1b[2J\x9b6n\x1b[31mred"
WORKER = {"exit_code": 1, "signal": None, "exception": "E: x"}
EXIT = {
    "type": "exit", "reason": "finished", "message": None, "exit_code": 0, "signal": None,
    "mono_start": 0.0, "mono_end": 1.0, "workers": {}, "ended": [], "left": [],
}  # fmt: skip
# Python can read it, but not look through it by recursion.
NESTED = "[" * 600 + '"\\ud800"' + "]" * 600
OVER = threading.Event()  # the control machine has hung up
TURN = threading.Lock()  # a frame is written as a whole
STEPS, SAMPLES = "rank1.1.steps.jsonl", "machine.1.jsonl"
ENDLESS = float("inf")


def out(data):
    """Bytes to the control machine; once it has hung up they go nowhere."""
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
    out(b"[" * 500_000 + b'\n\xff\xfe\n{"type": "log", "rank": "\xff"}\n')
    out(b'["exit"]\n"exit"\nnull\n7\n{"no": "type"}\n')
    os._exit(0)


def long_output(_):
    """15 MiB of lines, then a frame that there is not."""
    for _ in range(256):
        log(b"the same line again and again and again and again and again\n" * 1024)
    say(type="upgrade")


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


def lines(*documents):
    return b"".join(json.dumps(one).encode() + b"\n" for one in documents)


def odd_records(task):
    """Starts, steps, scores and samples that no rank and no guard writes, and then the end: as
    deep as Python reads, of any size, of other kinds."""
    deep = b"[" * 975 + b"]" * 975
    for value in (0, -1, 10**17, 1e308, None, "x", [], {"a": [{}]}):
        start = {"kind": "start", "attempt": 1, "world_size": value, "epochs": value}
        start.update(dict.fromkeys(("global_batch", "steps_per_epoch", "parameters"), value))
        step = {"kind": "step", "step": value, "steps": value, "samples": value, "epoch": value}
        step["seconds"] = {"data": value, "forward": value, "sync_exposed": value}
        score = {"kind": "evaluate", "epoch": value, "seconds": value}
        record(task, lines(start, step, step, score, {**score, "top1": value}))
        sample = dict.fromkeys(("mono", "cores", "cpu_busy", "memory_total", "disks"), value)
        sample.update(kind="sample", gpus=[value], card={"tx_bytes": value}, peers=value)
        record(task, lines(sample, sample), SAMPLES)
    for name in (STEPS, SAMPLES):
        record(
            task, b'{"kind": "start", "model": ' + deep + b', "attempt": 1}\n["start"]\n\0\n', name
        )
    say(**{**EXIT, "reason": "failed", "exit_code": 1})
    os._exit(0)


def write(task, data):
    """Into the file that its rank writes, which the real guard sends."""
    with (task["nodes"] / STEPS).open("ab", 0) as file:
        file.write(data)


def half_a_line(task):
    """Without end, while the real guard says what it says."""

    def go_on():
        while not OVER.wait(0.05):
            write(task, b"x" * 4096)

    threading.Thread(target=go_on, daemon=True).start()


def step(number, **more):
    spent = {"kind": "step", "step": number, "epoch": 0, "samples": 4, "seconds": {"backward": 0.1}}
    return lines({**spent, **more})


def begun(**fields):
    told = {"kind": "start", "attempt": 1, "mono": 1.0, "mono_process": 0.0, "world_size": 2}
    return lines({**told, **fields})


# What its rank writes beside its own lines.
BESIDE = {
    "half a line for ever": half_a_line,
    "steps without numbers": lambda task: write(
        task, step(4, samples=-ENDLESS, loss=ENDLESS - ENDLESS, seconds={"backward": ENDLESS})
    ),
    "a rank that is another": lambda task: write(task, begun(host="node1", rank=0) + step(1)),
}

# What comes after the third step.
AT_STEP = {
    **BESIDE,
    "a path for a record": lambda task: record(task, b"x\n", "../../../../.bashrc"),
    "a piece that comes twice": lambda task: [record(task, b"x\n", skipped=n) for n in (0, -2)],
    "records of any kind": odd_records,
    "lines that are no frames": odd_lines,
    "a path for a rank": lambda _: log(b"x\n", rank="../../../../.bashrc"),
    "another node's failure": lambda _: say(type="worker_exit", rank=0, first=True, **WORKER),
    "an exit of another host": lambda _: say(
        **{**EXIT, "reason": "failed", "host": "node1", "workers": {"0": WORKER}, "exit_code": 1}
    ),
    "finished while it trains": lambda _: say(**EXIT),
    "output without end": long_output,
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
    """Every name that is collected, or written to on the control machine, leads to a file there."""
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


def foreign(task):
    """Names of others, of none, and of no character set."""
    names = [b"nodes/node1/machine.1.jsonl", b"nodes/node1/rank0.1.steps.jsonl"]
    names += [b"samples/rank0.1.csv"]
    names += [b"nodes/node2/extra", b"nodes/node2/rank7.1.steps.jsonl", b"attempts.json"]
    names += [b"plan.json", b"checkpoints/node2/\xff\xfe.pt", b"checkpoints/node2/step-9\n.pt"]
    put(task["output"], map(os.fsdecode, names), lambda path: path.write_text("false"))


def odd_files(task):
    """Whole files of the right names, with the wrong things in them."""
    odd = '["start"]\n{"kind": "start", "attempt": "one"}\n' + "[" * 100_000 + "\nnull\n\x00\n"
    odd += '{"kind": "start", "attempt": ' + NESTED + "}\n"
    names = ("machine.1.jsonl", "rank1.1.steps.jsonl")
    put(task["nodes"], names, lambda path: path.write_text(odd))


# What becomes of its files when its part has ended well.
AT_END = {
    "specials": specials,
    "names of others": foreign,
    "records that are none": odd_files,
}


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
            if LIE != "links" and LIE not in BESIDE:
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
