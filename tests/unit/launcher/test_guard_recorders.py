"""What a guard records of its machine: whole lines, whatever cannot be read or written."""

import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launcher.node import idle, records
from launcher.node.link import read_task
from launcher.node.records import Recorder, RecordFile, Sampler, Tail

PARTS = sorted(Sampler().readers)


@pytest.fixture
def record(tmp_path):
    """record(**task) -> a recorder into an empty folder, what it tells, and its lines so far."""
    folder = tmp_path / "node"
    folder.mkdir()

    def make(pids=dict, **options):
        task = {"type": "start", "run": "r", "attempt": 2, "host": "h", "ranks": [0]}
        task.update({"argv": ["x"], "output": "o", "interface": "lo"}, **options)
        troubles = []
        made = Recorder(read_task(task), folder, lambda *trouble: troubles.append(trouble), pids)
        return made, troubles, lambda: read_lines(folder / "machine.2.jsonl")

    return make


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_record_is_of_samples_and_ends_with_how_the_node_s_part_did(record, tmp_path):
    made, troubles, lines = record(data=str(tmp_path))
    made.begin()
    for _ in range(2):
        time.sleep(0.2)
        made.tick()
    made.end({"mono_start": 1.0, "exit_code": 0}, {"0": 7})
    assert troubles == []
    *samples, last = lines()
    assert [line["kind"] for line in samples] == ["sample"] * 4
    assert [line["mono"] for line in samples] == sorted(line["mono"] for line in samples)
    assert all(line["card"]["interface"] == "lo" and line["disk_free"] > 0 for line in samples)
    assert all(line["cpu_busy"] > 0 and line["memory_total"] > 0 for line in samples)
    told = {"kind": "exit", "mono_start": 1.0, "exit_code": 0, "peak_memory_bytes": {"0": 7}}
    assert last == told
    assert [path.name for path in (tmp_path / "node").iterdir()] == ["machine.2.jsonl"]
    assert [*Tail(tmp_path, made.task).sent_bytes] == ["machine.2.jsonl", "rank0.2.steps.jsonl"]


@pytest.mark.parametrize(
    ("part", "error"),
    [
        *((part, OSError) for part in PARTS),
        *((PARTS[0], error) for error in records.READ_ERRORS if error is not OSError),
    ],
)
def test_what_fails_of_one_part_leaves_the_others(part, error):
    def fails():
        raise error("planted")

    told = []
    sampler = Sampler("lo", folder="/", report_trouble=lambda *trouble: told.append(trouble))
    usual = {name: set(read()) for name, read in sampler.readers.items()}
    sampler.readers[part] = fails
    line = sampler.sample()
    others = set().union(*(fields for name, fields in usual.items() if name != part))
    assert line.keys() == {"kind", "mono", "unix", *others}
    assert [what for what, why in told] == [part] and "planted" in told[0][1]


def test_a_kernel_that_says_nothing_costs_no_line(monkeypatch):
    monkeypatch.setattr(records, "read_text", lambda path: "")
    line = Sampler().sample()
    assert line["kind"] == "sample" and line["mono"] > 0 and "cpu_busy" not in line


@pytest.mark.parametrize("taken", [0.5, 0.0])
def test_a_full_disk_leaves_whole_lines(tmp_path, monkeypatch, taken):
    lines, write = RecordFile(tmp_path / "machine.1.jsonl"), os.write
    lines.append({"n": 1})

    def full(fd, data):
        written = write(fd, data[: max(3, int(len(data) * taken))])
        if not taken:
            raise OSError(errno.ENOSPC, "No space left on device")
        return written

    with monkeypatch.context() as patch, pytest.raises(OSError, match="space"):
        patch.setattr(os, "write", full)
        lines.append({"n": 2})
    lines.append({"n": 3})
    assert read_lines(tmp_path / "machine.1.jsonl") == [{"n": 1}, {"n": 3}]


def test_a_disk_that_takes_nothing_is_told_and_ends_nothing(record, tmp_path):
    made, troubles, _ = record()
    shutil.rmtree(tmp_path / "node")
    made.begin()
    made.tick()
    made.end({}, {})
    assert {what for what, _ in troubles} >= {"records"}
    assert not (tmp_path / "node").exists()


BUSY = (
    "import os, signal, sys, threading\n"
    "for _ in range(8): os.fork() or signal.pause()\n"
    "for _ in range(int(sys.argv[1])):\n"
    "    os.fork() or threading.Thread(target=exec, args=['while True: pass']).start()\n"
    "print(flush=True)\n"
    "sys.stdin.read()\n"
)


def test_a_hog_shows_in_what_a_rank_waits_for_a_processor():
    """Its loaders and threads count as its own; seven of them share a processor with each other,
    and eight that sleep are none."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    one = {min(os.sched_getaffinity(0))}
    rank = subprocess.Popen(
        [sys.executable, "-c", BUSY, "3"],
        **pipes,
        preexec_fn=lambda: (os.setsid(), os.sched_setaffinity(0, one)),
    )
    rank.stdout.readline()
    alive = {5: rank.pid}
    sampler, seen = Sampler(pids=lambda: dict(alive)), []
    limit = time.monotonic() + 60
    try:
        while not seen or (seen[-1]["waited"] < 1.0 and time.monotonic() < limit):
            seen.append(sampler.sample()["ranks"]["5"])
            time.sleep(0.05)
        os.kill(rank.pid, signal.SIGSTOP)
        os.waitpid(rank.pid, os.WUNTRACED)
        stopped = sampler.sample()["ranks"]["5"]
        alive.clear()
        assert "ranks" not in sampler.sample()
    finally:
        os.killpg(rank.pid, 9)
        rank.communicate()
    assert {one["state"] for one in seen} <= {"R", "S"} and stopped["state"] == "T"
    assert seen[-1]["waited"] >= 1.0 and seen[-1]["waited"] > 0.5 * seen[-1]["ran"] > 0
    assert seen == sorted(seen, key=lambda one: (one["ran"], one["waited"]))
    assert seen[-1]["loaders_busy"] > 0.75 * seen[-1]["loaders"] > 0


def test_a_rank_that_has_just_ended_keeps_its_times():
    rank = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    sampler = Sampler(pids=lambda: {0: rank.pid})
    before = sampler.sample()["ranks"]["0"]
    rank.communicate()
    after = sampler.sample()["ranks"]["0"]
    assert after["ran"] >= before["ran"] and after.keys() == before.keys()


class Rank:
    """A rank as its sampler counts it."""

    def __init__(self):
        self.cpu_times, self.pid, self.pids, self.ran = {0: self}, os.getpid(), [], 0.0
        self.gpu_busy_time = 0.0


def test_a_rank_is_idle_while_it_neither_computes_nor_moves_anything(monkeypatch):
    rank, moved = Rank(), [0]
    monkeypatch.setattr(idle, "count_moved_bytes", lambda _: moved[0])
    idleness = idle.Idleness(rank)
    said = []
    for second in range(0, 130, 10):
        rank.ran += 0.05 + 5 * (second == 30)
        moved[0] += second == 60
        rank.gpu_busy_time = 990.0 + second if second == 90 else rank.gpu_busy_time
        said.append(idleness.seconds(1000.0 + second))
    assert said == [0, 0, 10, 0, 0, 10, 0, 10, 20, 0, 0, 10, 20]
    monkeypatch.setattr(idle, "count_moved_bytes", lambda _: int("unknown"))
    assert idleness.seconds(1200.0) is None


def test_what_a_process_reads_writes_and_sends_is_counted(tmp_path):
    rank = Rank()
    rank.pids = [rank.pid, 1 << 22]  # no process has this one
    counts = [idle.count_moved_bytes([rank])]
    (tmp_path / "file").write_bytes(bytes(1 << 20))
    counts.append(idle.count_moved_bytes([rank]))
    ours, peer = socket.create_server(("127.0.0.1", 0)), socket.socket()
    with ours, peer:
        peer.connect(ours.getsockname())
        with ours.accept()[0] as connection:
            for _ in range(16):  # neither send() nor recv() counts as writing or reading
                peer.sendall(bytes(1 << 16))
                connection.recv(1 << 16, socket.MSG_WAITALL)
            counts.append(idle.count_moved_bytes([rank]))
    assert all(after - before >= 1 << 20 for before, after in zip(counts, counts[1:]))


def test_a_run_of_months_is_thinned(record, monkeypatch):
    monkeypatch.setattr(records, "DECIMATE_AFTER", 4)
    made, _, lines = record()
    for _ in range(4 + 8 + 16):
        made.tick()
    made.end({}, {})
    assert [line["kind"] for line in lines()] == ["sample"] * (4 + 4 + 4 + 1) + ["exit"]


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """nvidia_smi(text): the program of that name."""

    def make(text):
        tool = tmp_path / "bin/nvidia-smi"
        tool.parent.mkdir()
        tool.write_text(text)
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", str(tool.parent), prepend=os.pathsep)

    return make


def test_nvidia_smi_is_read_line_by_line(record, nvidia_smi):
    nvidia_smi(
        f"#!{sys.executable}\n"
        "import sys, time\n"
        "assert '--query-gpu=index,utilization.gpu,memory.used,temperature.gpu,power.draw,"
        "clocks.sm' in sys.argv\n"
        "for index in 0, 1:\n"
        "    print(f'{index}, 50, 100, 60, 70.5, 1500', flush=True)\n"
        "time.sleep(600)\n"
    )
    made, troubles, lines = record()
    made.begin()
    pid = made.sampler.gpus.process.process.pid
    assert "nvidia-smi" in Path(f"/proc/{pid}/cmdline").read_text()
    limit = time.monotonic() + 20
    while not any("gpus" in line for line in lines()) and time.monotonic() < limit:
        time.sleep(0.05)
        made.tick()
    made.end({}, {})
    assert troubles == []
    cards = [card for line in lines() for card in line.get("gpus", [])]
    assert [card["index"] for card in cards] == [0, 1] and cards[0]["power"] == 70.5
    assert not Path(f"/proc/{pid}").exists()


def test_a_field_that_the_driver_does_not_know_costs_no_other_figure(record, nvidia_smi):
    nvidia_smi(
        f"#!{sys.executable}\n"
        "import sys, time\n"
        "for field in ('power.draw', 'clocks.sm'):\n"
        "    if field in sys.argv[1]:\n"
        "        print(f'Field \"{field}\" is not a valid field to query.\\n')\n"
        "        sys.exit(2)\n"
        "print('0, 50, 100, 60', flush=True)\n"
        "time.sleep(600)\n"
    )
    made, troubles, lines = record()
    made.begin()
    limit = time.monotonic() + 20
    while not any("gpus" in line for line in lines()) and time.monotonic() < limit:
        time.sleep(0.05)
        made.tick()
    made.end({}, {})
    assert troubles == []
    cards = [card for line in lines() for card in line.get("gpus", [])]
    assert {(card["temperature"], card.get("power")) for card in cards} == {(60, None)}


def test_a_tool_that_cannot_be_started_is_told_and_ends_nothing(record, nvidia_smi):
    nvidia_smi("#!/no/such/interpreter\n")
    made, troubles, lines = record()
    made.begin()
    made.end({}, {})
    assert [what for what, _ in troubles] == ["nvidia-smi"]
    assert [line["kind"] for line in lines()] == ["sample", "sample", "exit"]


def test_what_top_is_told_are_lines_of_the_same_kind():
    script = "from launcher.node import records; records.INTERVAL = 0.05; records.stream()"
    with subprocess.Popen(
        [sys.executable, "-c", script], cwd=Path(__file__).parents[3], stdout=subprocess.PIPE
    ) as process:
        told = [json.loads(process.stdout.readline()) for _ in range(2)]
        process.stdout.close()  # nobody reads: it ends
        assert process.wait(20) is not None
    assert all(line["kind"] == "sample" and line["cpu_busy"] > 0 for line in told)
