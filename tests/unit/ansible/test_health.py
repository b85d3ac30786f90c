"""How machines are between runs: what programs print on them, what is believed of it, the table."""

import json

from planning import health
from tests.unit.ansible.provision_machines import ROOT, load

collect = load("ansible/library/health_facts.py")

# nvidia-smi --query-gpu=index,temperature.gpu,power.draw,name --format=csv,noheader,nounits
SMI = """\
0, 41, 18.52, NVIDIA GeForce RTX 2080 Ti
1, 88, [N/A], NVIDIA GeForce GTX 1080 Ti
2, ERR!, ERR!, NVIDIA GeForce RTX 2080 Ti
3, [Not Supported], [Unknown Error], Quadro P400
"""
LOST = (
    "Unable to determine the device handle for GPU 0000:01:00.0: GPU is lost.  Reboot the system "
    "to recover this GPU\n"
)
# Lines of the kernels of Ubuntu 18.04 (4.15) to Debian 13 (6.12), and NVIDIA's of 410 to 580.
LOG = """\
nvidia: loading out-of-tree module taints kernel.
NVRM: loading NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024
NVRM: GPU at PCI:0000:01:00: GPU-12345678-9abc-def0-1234-56789abcdef0
NVRM: Xid (PCI:0000:01:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
NVRM: Xid (PCI:0000:01:00): 31, pid=2519, name=python, Ch 00000008, intr 10000000. MMU Fault
NVRM: Xid (0000:01:00): 31, Ch 00000010, engmask 00000101, intr 10000000
print_req_error: I/O error, dev sda, sector 1953521664
blk_update_request: I/O error, dev sda, sector 2048 op 0x0:(READ) flags 0x0 phys_seg 1 prio class 0
blk_update_request: critical medium error, dev nvme0n1, sector 512 op 0x0:(READ) flags 0x80700
Buffer I/O error on dev sdb1, logical block 0, async page read
EXT4-fs error (device dm-0): ext4_find_entry:1463: inode #2: comm ls: reading directory lblock 0
XFS (sdc1): metadata I/O error in "xfs_trans_read_buf_map" at daddr 0x2 len 1 error 5
blk_update_request: I/O error, dev fd0, sector 0
I/O error, dev sr0, sector 0 op 0x0:(READ) flags 0x0 phys_seg 1 prio class 2
I/O error, dev loop3, sector 0 op 0x0:(READ) flags 0x80700 phys_seg 1 prio class 2
EXT4-fs (sda2): mounted filesystem with ordered data mode. Opts: errors=remount-ro
"""


def told(**changes):
    """What a machine with one card says of itself where nothing is wrong."""
    return {
        "smi": {"done": True, "text": "0, 35, 12.00, NVIDIA GeForce RTX 2080 Ti\n"},
        "errors": {"xids": {}, "disks": {}},
        "ext4_errors": {},
        "disks": [{"folder": "/", "size": 500_000_000_000, "free": 212_400_000_000}],
        "held": [],
        "kernel": "6.1.0-31-amd64",
        "waiting_kernel": None,
        "reboot_required": False,
        **changes,
    }


def row(host="pc1", **changes):
    return health.health(told(**changes), host)


def test_errors_of_cards_and_disks_are_counted_in_the_kernels_log():
    assert collect.errors(LOG) == {
        "xids": {"79": 1, "31": 2},
        "disks": {"sda": 2, "nvme0n1": 1, "sdb1": 1, "dm-0": 1, "sdc1": 1},
    }
    flood = "".join(f"I/O error, dev sd{number}, sector 0\n" for number in range(10_000))
    assert len(collect.errors(flood)["disks"]) == collect.KINDS


def test_a_log_that_may_not_be_read_is_not_a_clean_one(monkeypatch):
    answers = {"journalctl": "", "dmesg": None}
    monkeypatch.setattr(collect, "output", lambda *argv, seconds=10: answers[argv[0]])
    assert collect.kernel_log() is None
    answers["dmesg"] = "Linux version 4.15"
    assert collect.kernel_log() == "Linux version 4.15"


def test_one_folder_of_each_disk_is_looked_at_there_or_not(tmp_path):
    (found,) = collect.disks([str(tmp_path), str(tmp_path / "not" / "yet")])
    assert found["folder"] == str(tmp_path) and 0 <= found["free"] <= found["size"]


def test_what_nvidia_smi_prints_for_figures_that_it_has_not():
    cards = row(smi={"done": True, "text": SMI})["gpus"]
    assert [card["celsius"] for card in cards] == [41, 88, None, None]
    assert [card["watts"] for card in cards] == [18.52, None, None, None]
    assert [card["lost"] for card in cards] == [False, False, True, True]
    found = health.findings(row(smi={"done": True, "text": SMI}))
    assert [one["fault"] for one in found] == ["gpu_hot", "gpu_failed", "gpu_failed"]
    assert health.findings(row(smi=None)) == []  # no driver: others say so where there is a card
    assert health.findings(row()) == health.findings(health.absent("pc1")) == []


# {fault, or fault and case: what such a machine says}; the sentences: tests/messages/ansible.txt.
ILL = {
    "gpu_hot": {"smi": {"done": True, "text": SMI.splitlines()[1]}},
    "gpu_failed": {"smi": {"done": False, "text": LOST}},
    "gpu_failed, errors": {"smi": {"done": True, "text": SMI.splitlines()[2]}},
    "xid": {"errors": {"xids": {"79": 1}, "disks": {}}},
    "xid, unknown": {"errors": {"xids": {"7": 2}, "disks": {}}},
    "xid_program": {"errors": {"xids": {"31": 2}, "disks": {}}},
    "disk_errors": {"errors": {"xids": {}, "disks": {"sda": 12}}},
    "reboot_waits": {"waiting_kernel": "6.1.0-32-amd64"},
    "reboot_waits, packages": {"reboot_required": True},
}


def test_what_ext4_wrote_down_counts_without_the_log():
    made = row(errors=None, ext4_errors={"sda2": 3})
    assert (made["disk_errors"], made["xids"]) == ({"sda2": 3}, None)


def test_a_line_a_machine_of_at_most_80_columns_the_absent_ones_too():
    rows = [
        row("pc1", errors={"xids": {"79": 1, "31": 2}, "disks": {}}, held=["linux-image-amd64"]),
        health.absent("pc2"),
        row("a-very-long-name-of-a-machine", smi={"done": True, "text": SMI * 3}, errors=None,
            held=["bash", "linux-generic"], waiting_kernel="7",
            disks=[{"folder": "/", "size": 9 * 10**12, "free": 81 * 10**11},
                   {"folder": "/srv", "size": 9 * 10**12, "free": 9_400_000_000}]),
        row("pc4", smi={"done": False, "text": LOST}),
        row("pc5", smi=None, held=None, disks=[]),
    ]  # fmt: skip
    assert health.table(rows) == [
        "machine          GPU °C          free GB disk errors Xid   kernel",
        "pc1              35              212     -           31 79 held",
        "pc2              does not answer",
        "a-very-long-nam~ 41 88 ERR ERR ~ 9       ?           ?     held, reboot",
        "pc4              fails           212     -           -     -",
        "pc5              -               ?       -           -     ?",
        "?: not known, since sudo was refused or nothing there reports it",
    ]


def test_check_shows_findings_then_the_table_in_the_order_of_the_inventory(monkeypatch, tmp_path):
    check = load("ansible/check.py")
    note = {"fault": "reboot_waits", "cause": "kernel 7\x1b[2J waits", "remedy": "sudo reboot"}
    found = {
        "findings": [{"host": "pc2", "fault": "xid", "cause": "b", "remedy": "c"},
                     {"host": "pc1", **note}],
        "healthy": [row("pc1")],
        "absent": ["pc2"],
        "local": [],
        "order": ["pc1", "pc2", "pc3"],
    }  # fmt: skip

    def ansible(argv, environment):
        output = json.loads(argv[argv.index("--extra-vars") + 1])["check_output"]
        (tmp_path / "written").symlink_to(output)
        (tmp_path / "written").write_text(json.dumps(found))
        return ""

    monkeypatch.setattr(check, "run_playbook", ansible)
    inspected = check.inspect(None, [])
    assert [one["host"] for one in inspected["machines"]] == ["pc1", "pc2"]
    said = check.text(**inspected)
    assert said.startswith("pc2\n  - B\n    Remedy: c\nProblems: 1. Nothing was changed.\n")
    assert "Note on pc1:\n  - Kernel 7 [2J waits\n" in said
    assert said.endswith("\npc2     does not answer") and "\n\nmachine GPU °C" in said


def test_the_page_says_what_json_has():
    page = (ROOT / "docs/preflight.md").read_text()
    for part in row():
        assert f'"{part}"' in page, part
