"""The recorders' files: whole lines, also after a kill or on a full disk."""

import errno
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launcher.node import disks, recorder
from launcher.node.recorder import JsonLines, MachineRecorder, NetworkRecorder, Recorder
from launcher.node.task import read_task

IOSTAT = Path(__file__).with_name("iostat.json").read_text()  # sysstat 12.6.1, -o JSON -d -x -y 1


def test_a_cut_iostat_document_ends_with_its_last_whole_report():
    whole = json.loads(IOSTAT)["sysstat"]["hosts"][0]["statistics"]
    counts = []
    for length in range(len(IOSTAT)):
        document = disks.complete(IOSTAT[:length])
        if document is not None:
            reports = document["hosts"][0]["statistics"]
            assert reports == whole[: len(reports)]
            counts.append(len(reports))
    assert counts == sorted(counts)
    assert set(counts) == {0, 1, 2, 3}
    assert disks.complete(IOSTAT[:40]) is None
    assert disks.complete(IOSTAT) == json.loads(IOSTAT)["sysstat"]


@pytest.fixture
def record(tmp_path):
    """A recorder of everything, its troubles in a list."""

    def make(**options):
        task = {"type": "start", "run": "r", "attempt": 2, "host": "h", "ranks": [0]}
        task.update({"argv": ["x"], "output": "o", "interface": "lo"}, **options)
        troubles = []
        made = Recorder(read_task(task), tmp_path, lambda *trouble: troubles.append(trouble))
        return made, troubles

    return make


@pytest.mark.parametrize("source", ["iostat", "diskstats"])
def test_recording_for_a_second(record, tmp_path, monkeypatch, source):
    if source == "iostat" and not disks.has_iostat():
        pytest.skip("sysstat is not installed here")
    monkeypatch.setattr(disks, "has_iostat", lambda: source == "iostat")
    made, troubles = record(data=str(tmp_path))
    began = time.monotonic()
    made.start()
    time.sleep(1.05)
    made.sample()
    made.stop()
    assert troubles == []
    (entry,) = json.loads((tmp_path / "iostat.json").read_text())["attempts"]
    assert (entry["attempt"], entry["source"], entry["interval"]) == (2, source, 1.0)
    assert began <= entry["mono_start"] <= time.monotonic()
    assert "data_disk" in entry
    host = entry["sysstat"]["hosts"][0]
    assert host["nodename"] == os.uname().nodename
    assert len(host["statistics"]) >= 1
    lines = [json.loads(line) for line in (tmp_path / "net.jsonl").read_text().splitlines()]
    assert len(lines) == 3
    assert all(line["attempt"] == 2 and line["interface"] == "lo" for line in lines)
    assert [line["mono"] for line in lines] == sorted(line["mono"] for line in lines)
    names = ["iostat.json", "machine.jsonl", "net.jsonl"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_what_a_killed_guard_recorded_is_not_lost(record, tmp_path):
    head = {"attempt": 1, "source": "iostat", "mono_start": 9.0, "interval": 1.0}
    cut = IOSTAT[: IOSTAT.rindex("disk_device") - 20]
    (tmp_path / ".iostat.1.part").write_text(json.dumps(head) + "\n" + cut)
    made, _ = record()
    made.start()
    made.stop()
    entries = json.loads((tmp_path / "iostat.json").read_text())["attempts"]
    assert [entry["attempt"] for entry in entries] == [1, 2]
    assert len(entries[0]["sysstat"]["hosts"][0]["statistics"]) == 2
    assert list(tmp_path.glob(".iostat*")) == []


def test_an_interface_that_is_not_there_is_told_and_stops_no_other_recorder(record, tmp_path):
    made, troubles = record(interface="eth9")
    made.start()
    made.stop()
    assert troubles[0] == ("network recorder", "OSError: there is no network interface eth9")
    assert (tmp_path / "iostat.json").exists()


def test_a_full_disk_leaves_whole_lines(tmp_path, monkeypatch):
    lines, write = JsonLines(tmp_path / "net.jsonl"), os.write
    lines.append({"n": 1})

    def half(fd, data):
        return write(fd, data[: len(data) // 2])

    def none(fd, data):
        write(fd, data[:3])
        raise OSError(errno.ENOSPC, "No space left on device")

    for broken in (half, none):
        monkeypatch.setattr(os, "write", broken)
        with pytest.raises(OSError, match="space"):
            lines.append({"n": 2})
    monkeypatch.setattr(os, "write", write)
    lines.append({"n": 3})
    assert (tmp_path / "net.jsonl").read_text() == '{"n": 1}\n{"n": 3}\n'


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path):
    path = tmp_path / "exit.json"
    disks.write_json(path, {"attempts": [1]})
    with pytest.raises(TypeError):
        disks.write_json(path, {"attempts": object()})
    assert disks.read_attempts(path) == [1]
    path.write_text("{")
    assert disks.read_attempts(path) == []


def test_the_speed_of_a_link_is_null_where_the_card_does_not_say(tmp_path):
    made = NetworkRecorder(tmp_path, 1, "lo")
    made.start()
    assert json.loads((tmp_path / "net.jsonl").read_text())["speed_mbit"] is None


BUSY = (
    "import os, sys, threading\n"
    "for _ in range(int(sys.argv[1])):\n"
    "    os.fork() or threading.Thread(target=exec, args=['while True: pass']).start()\n"
    "print(flush=True)\n"
    "sys.stdin.read()\n"
)


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_hog_shows_in_what_a_rank_waits_for_a_processor(tmp_path):
    """Its loaders and threads count as its own; three of them share a processor with each other."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    one = {min(os.sched_getaffinity(0))}
    rank = subprocess.Popen(
        [sys.executable, "-c", BUSY, "3"],
        **pipes,
        preexec_fn=lambda: (os.setsid(), os.sched_setaffinity(0, one)),
    )
    rank.stdout.readline()
    machine = MachineRecorder(tmp_path, 1, lambda: {5: rank.pid})
    limit = time.monotonic() + 60
    try:
        machine.start()
        while machine.latest["ranks"]["5"]["waited"] < 1.0 and time.monotonic() < limit:
            time.sleep(0.05)
            machine.sample()
        machine.workers = dict
        machine.stop()
    finally:
        os.killpg(rank.pid, 9)
        rank.communicate()
    *lines, last = read_lines(tmp_path / "machine.jsonl")
    seen = [line["ranks"]["5"] for line in lines]
    assert seen[-1]["waited"] >= 1.0 and seen[-1]["waited"] > 0.5 * seen[-1]["ran"] > 0
    assert seen == sorted(seen, key=lambda one: (one["ran"], one["waited"]))
    assert last["ranks"] == {} and last["cpu_busy"] >= lines[0]["cpu_busy"] > 0


def test_a_run_of_months_is_thinned(tmp_path, monkeypatch):
    monkeypatch.setattr(recorder, "THINNED", 4)
    machine = MachineRecorder(tmp_path, 1, dict)
    for _ in range(4 + 8 + 16):
        machine.sample()
    machine.stop()
    assert len(read_lines(tmp_path / "machine.jsonl")) == 4 + 4 + 4 + 1


def test_nvidia_smi_is_read_line_by_line(record, tmp_path, monkeypatch):
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(
        f"#!{sys.executable}\n"
        "import sys, time\n"
        "assert '--query-gpu=index,utilization.gpu,memory.used,temperature.gpu,power.draw,"
        "clocks.sm' in sys.argv\n"
        "for index in 0, 1:\n"
        "    print(f'{index}, 50, 100, 60, 70.5, 1500', flush=True)\n"
        "time.sleep(600)\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tool.parent), prepend=os.pathsep)
    made, troubles = record()
    made.start()
    (pid,) = [pid for pid in made.pids() if "nvidia-smi" in " ".join(command(pid))]
    limit = time.monotonic() + 10
    while not (tmp_path / "gpu.jsonl").exists() and time.monotonic() < limit:
        time.sleep(0.05)
        made.sample()
    made.stop()
    assert troubles == []
    lines = [json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text().splitlines()]
    assert [(line["attempt"], line["index"]) for line in lines] == [(2, 0), (2, 1)]
    assert subprocess.run(["kill", "-0", str(pid)], stderr=subprocess.DEVNULL).returncode != 0


def command(pid):
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
