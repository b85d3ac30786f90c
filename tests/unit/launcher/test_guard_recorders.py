"""What the recorders read, from samples of the kernel's and of other tools' own texts."""

import errno
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launcher.node import counters, disks
from launcher.node.recorder import JsonLines, NetworkRecorder, Recorder
from launcher.node.task import read_task

NET_DEV = """\
Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo:    9236      92    0    0    0     0          0         0     9236      92    0    0    0     0       0          0
  eth0:4017486868 2736425    0    7    0     0          0         0  4697720   69861    0    3    0     0       0          0
wlp3s0f0u1: 12 1 0 0 0 0 0 0 34 1 0 0 0 0 0 0
"""  # noqa: E501
NET_SNMP = """\
Ip: Forwarding DefaultTTL InReceives
Ip: 1 64 2812
Tcp: RtoAlgorithm RtoMin RtoMax MaxConn ActiveOpens PassiveOpens AttemptFails EstabResets CurrEstab InSegs OutSegs RetransSegs InErrs OutRsts InCsumErrors
Tcp: 1 200 120000 -1 81 64 6 7 6 2713 2805 41 0 22 0
Udp: InDatagrams NoPorts
Udp: 12 0
"""  # noqa: E501
ROUTE = """\
Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT
docker0\t000011AC\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0
eno1\t00000000\t0138A8C0\t0003\t0\t0\t100\t00000000\t0\t0\t0
"""
ROUTE6 = """\
fe800000000000000000000000000000 40 00000000000000000000000000000000 00 00000000000000000000000000000000 00000100 00000001 00000000 00000001     eno1
00000000000000000000000000000000 00 00000000000000000000000000000000 00 fe800000000000000000000000000001 00000400 00000002 00000000 00000003     eno2
00000000000000000000000000000000 00 00000000000000000000000000000000 00 00000000000000000000000000000000 ffffffff 00000001 00000000 00200200       lo
"""  # noqa: E501
MOUNTS = """\
/dev/sda2 / ext4 rw,relatime 0 0
192.168.56.111:/srv/tandem/data /srv/tandem/my\\040data nfs4 rw,relatime,vers=4.2 0 0
//NAS/Images /mnt/images cifs rw,relatime,vers=3.1.1 0 0
"""
MOUNTSTATS = """\
device /dev/sda2 mounted on / with fstype ext4
device 192.168.56.111:/srv/tandem/data mounted on /srv/tandem/my\\040data with fstype nfs4 statvers=1.1
\topts:\trw,vers=4.2,rsize=1048576
\tage:\t1234
\tevents:\t52 1034 0 0
\tbytes:\t84022 0 0 0 52428800 17 12800 0
\tRPC iostats version: 1.1  p/v: 100003/4 (nfs)
\t\tREAD: 51 51 0 10812 52436000 3 991 1001 0
"""  # noqa: E501
CIFS_NEW = """\
Resources in use
CIFS Session: 1
Share (unique mount targets): 2
0 session 0 share reconnects
Total vfs operations: 16 maximum at one time: 2

Max requests in flight: 9
1) \\\\nas\\Images
SMBs: 20
Bytes read: 41943040  Bytes written: 1000
Open files: 0 total (local), 0 open on server
Reads: 12 total 0 failed
"""
CIFS_OLD = """\
1) \\\\nas\\Images
SMBs: 9 Oplocks breaks: 0
Reads:  4 Bytes: 4096
Writes: 0 Bytes: 0
"""
DISKSTATS_1 = """\
   7       0 loop0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0
 259       0 nvme0n1 1000 10 20480 500 100 0 800 40 0 300 540 0 0 0 0 0 0
 259       1 nvme0n1p1 1000 10 20480 500 100 0 800 40 0 300 540
"""
DISKSTATS_2 = """\
   7       0 loop0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0
 259       0 nvme0n1 1200 10 61440 900 100 0 800 40 0 1300 1540 0 0 0 0 0 0
 259       1 nvme0n1p1 1200 10 61440 900 100 0 800 40 0 1300 1540
"""
IOSTAT = Path(__file__).with_name("iostat.json").read_text()  # sysstat 12.6.1, -o JSON -d -x -y 1


def test_network_counters():
    assert counters.network(NET_DEV, NET_SNMP, "eth0") == {
        "rx_bytes": 4017486868,
        "tx_bytes": 4697720,
        "rx_dropped": 7,
        "tx_dropped": 3,
        "tcp_retransmits": 41,
    }
    assert counters.network(NET_DEV, NET_SNMP, "wlp3s0f0u1")["tx_bytes"] == 34
    assert counters.network(NET_DEV, NET_SNMP, "eth") is None


def test_the_interface_of_the_default_route():
    assert counters.default_interface(ROUTE, ROUTE6) == "eno1"
    assert counters.default_interface("", ROUTE6) == "eno2"
    assert counters.default_interface("Iface\n", "") == ""


def test_bytes_read_from_shares():
    assert counters.shares(MOUNTS) == {
        "/srv/tandem/my data": ("192.168.56.111:/srv/tandem/data", "nfs4"),
        "/mnt/images": ("//NAS/Images", "cifs"),
    }
    assert counters.nfs_read_bytes(MOUNTSTATS) == {"/srv/tandem/my data": 52428800}
    assert counters.cifs_read_bytes(CIFS_NEW) == {"//nas/images": 41943040}
    assert counters.cifs_read_bytes(CIFS_OLD) == {"//nas/images": 4096}
    assert counters.share_of("//NAS/Images/train/2012") == "//nas/images"


def test_disk_rates_are_those_of_iostat():
    old, new = counters.disks(DISKSTATS_1), counters.disks(DISKSTATS_2)
    assert set(old) == {"nvme0n1", "nvme0n1p1"}
    rates = counters.disk_rates(old["nvme0n1"], new["nvme0n1"], 2.0)
    assert rates == {
        "r/s": 100.0,
        "w/s": 0.0,
        "rkB/s": 10240.0,  # 40960 sectors of 512 bytes in 2 s
        "wkB/s": 0.0,
        "rrqm/s": 0.0,
        "wrqm/s": 0.0,
        "r_await": 2.0,
        "w_await": 0.0,
        "rareq-sz": 102.4,
        "wareq-sz": 0.0,
        "aqu-sz": 0.5,
        "util": 50.0,
    }


def test_gpu_lines():
    line = counters.gpu("1, 97, 10842, 74, 249.81, 1905", 5.5)
    assert line == {
        "mono": 5.5,
        "index": 1,
        "utilization": 97.0,
        "memory_used": 10842 * 1024 * 1024,
        "temperature": 74.0,
        "power": 249.81,
        "clock_sm": 1905.0,
    }
    assert counters.gpu("0, 3, 5, 40, [N/A], [Not Supported]", 1.0)["power"] is None
    assert counters.gpu("Unable to determine the device handle", 1.0) is None


def test_a_whole_iostat_document_is_taken_as_it_is():
    assert disks.complete(IOSTAT) == json.loads(IOSTAT)["sysstat"]
    assert len(disks.complete(IOSTAT)["hosts"][0]["statistics"]) == 3


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
    assert disks.complete("") is None
    assert disks.complete(IOSTAT[:40]) is None


@pytest.fixture
def record(tmp_path):
    """A recorder of everything, its troubles in a list."""

    def make(**options):
        task = {"type": "start", "run": "r", "attempt": 2, "host": "h", "ranks": [0]}
        task.update({"argv": ["x"], "output": "o", "interface": "lo"}, **options)
        troubles = []
        recorder = Recorder(read_task(task), tmp_path, lambda *trouble: troubles.append(trouble))
        return recorder, troubles

    return make


@pytest.mark.parametrize("source", ["iostat", "diskstats"])
def test_recording_for_two_seconds(record, tmp_path, monkeypatch, source):
    if source == "iostat" and not disks.has_iostat():
        pytest.skip("sysstat is not installed here")
    monkeypatch.setattr(disks, "has_iostat", lambda: source == "iostat")
    recorder, troubles = record(data=str(tmp_path))
    began = time.monotonic()
    recorder.start()
    for _ in range(2):
        time.sleep(1.05)
        recorder.sample()
    recorder.stop()
    assert troubles == []
    (entry,) = json.loads((tmp_path / "iostat.json").read_text())["attempts"]
    assert (entry["attempt"], entry["source"], entry["interval"]) == (2, source, 1.0)
    assert began <= entry["mono_start"] <= time.monotonic()
    assert "data_disk" in entry
    host = entry["sysstat"]["hosts"][0]
    assert host["nodename"] == os.uname().nodename
    assert len(host["statistics"]) >= 2
    lines = [json.loads(line) for line in (tmp_path / "net.jsonl").read_text().splitlines()]
    assert len(lines) == 4
    assert all(line["attempt"] == 2 and line["interface"] == "lo" for line in lines)
    assert [line["mono"] for line in lines] == sorted(line["mono"] for line in lines)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iostat.json", "net.jsonl"]


def test_what_a_killed_guard_recorded_is_not_lost(record, tmp_path):
    head = {"attempt": 1, "source": "iostat", "mono_start": 9.0, "interval": 1.0}
    cut = IOSTAT[: IOSTAT.rindex("disk_device") - 20]
    (tmp_path / ".iostat.1.part").write_text(json.dumps(head) + "\n" + cut)
    recorder, _ = record()
    recorder.start()
    recorder.stop()
    entries = json.loads((tmp_path / "iostat.json").read_text())["attempts"]
    assert [entry["attempt"] for entry in entries] == [1, 2]
    assert len(entries[0]["sysstat"]["hosts"][0]["statistics"]) == 2
    assert list(tmp_path.glob(".iostat*")) == []


def test_an_interface_that_is_not_there_is_told_and_stops_no_other_recorder(record, tmp_path):
    recorder, troubles = record(interface="eth9")
    recorder.start()
    recorder.stop()
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
    recorder = NetworkRecorder(tmp_path, 1, "lo")
    recorder.start()
    assert json.loads((tmp_path / "net.jsonl").read_text())["speed_mbit"] is None


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
    recorder, troubles = record()
    recorder.start()
    (pid,) = [pid for pid in recorder.pids() if "nvidia-smi" in " ".join(command(pid))]
    limit = time.monotonic() + 10
    while not (tmp_path / "gpu.jsonl").exists() and time.monotonic() < limit:
        time.sleep(0.05)
        recorder.sample()
    recorder.stop()
    assert troubles == []
    lines = [json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text().splitlines()]
    assert [(line["attempt"], line["index"]) for line in lines] == [(2, 0), (2, 1)]
    assert subprocess.run(["kill", "-0", str(pid)], stderr=subprocess.DEVNULL).returncode != 0


def command(pid):
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
