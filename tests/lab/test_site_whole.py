"""All of site.yml with addresses, firewall and Samba on four machines: used and taken back."""

import re
import subprocess

import pytest

from tests.lab.apt_archive import give_packages
from tests.lab.disks import changed_files
from tests.lab.knock import answering
from tests.lab.site_plays import changed_tasks, changes, draw_digits, play, write_inventory

NODES = (1, 2, 3, 4)
SMB = "share_protocol=smb share_host=node1"
# Only node1 shares: the lab's kernel cannot mount. The mounts: test_share_mounts.py.
HOSTS = {
    "node1": f"ansible_host=192.168.56.111 address=192.168.56.121/24 {SMB}",
    "node2": "ansible_host=192.168.56.112 address=192.168.56.122/24",
    "node3": "ansible_host=192.168.56.113 address=192.168.56.123/24",
    "node4": "ansible_host=192.168.56.114 address=192.168.56.124/24 network_mode=replace",
}
# Code and runs stay; dpkg and apt write into their own books whatever comes and goes; users and
# groups that Debian's packages make stay by Debian's rules, and are looked at by themselves.
OF_OTHERS = ("home/tandem/tandem/", "var/lib/dpkg/", "var/lib/apt/", "var/lib/ucf/",
             "etc/ld.so.cache", "etc/passwd", "etc/group", "etc/shadow", "etc/gshadow",
             "etc/subuid", "etc/subgid")  # fmt: skip
USERS = "cut -d: -f1 /etc/passwd"


def address(node: int) -> str:
    return f"192.168.56.{120 + node}"


def at(lab, node: int, line: str, **options) -> str:
    """A command line on a node by its new address."""
    return lab.control("ssh", "-o", "ConnectTimeout=5", f"tandem@{address(node)}", line,
                       **options).stdout  # fmt: skip


def addresses(lab, node: int) -> list[str]:
    """All addresses of a node: an added one leaves the present one, on which Gloo listens."""
    return at(lab, node, "hostname --all-ip-addresses").split()


class Cluster:
    """The lab, the inventory, and what was on the disks before."""

    def __init__(self, lab, folder):
        self.lab = lab
        self.folder = folder
        self.inventory = write_inventory(folder, HOSTS)
        self.before = {node: changed_files(lab, node, OF_OTHERS) for node in NODES}
        self.users = {node: set(lab.ssh(node, USERS).split()) for node in NODES}

    def play(self, playbook: str, *words: str, check: bool = True):
        secret = f"share_secret_folder={self.folder / 'secret'}"
        done = play(self.lab, playbook, "--inventory", self.inventory, "-e", secret, *words,
                    check=False)  # fmt: skip
        errors = [line for line in done.stdout.splitlines() if line.startswith("[ERROR]")]
        assert not check or done.returncode == 0, errors
        return done


@pytest.fixture(scope="module")
def cluster(start_lab, tmp_path_factory):
    draw_digits()
    lab = start_lab("whole", "--nodes", "4", "--rate", "1gbit")
    give_packages(lab, [1], "samba")
    # As on a machine with today's updates: what Samba's packages would only bring along stays.
    lab.ssh(1, "sudo apt-get -q -y upgrade")
    made = Cluster(lab, tmp_path_factory.mktemp("whole"))
    made.play("site.yml", "-e", "network_update_inventory=true")
    return made


def test_a_second_run_changes_nothing(cluster):
    again = cluster.play("site.yml", "-e", "network_update_inventory=true")
    assert changes(again) == {f"node{node}": 0 for node in NODES}, changed_tasks(again)


def test_a_stranger_reaches_ssh_alone_during_a_run(cluster):
    """Every port that listens while four machines train: torch chooses most of them at random."""
    lab = cluster.lab
    argv = ["python", "-m", "launcher", "train", "--inventory", cluster.inventory]
    # Not the default model: the run has to last while the stranger knocks.
    argv += ["--nodes", "4", "--model", "resnet18", "--epochs", "6"]
    running = subprocess.Popen(lab.argv("exec", "--", *argv), stdin=subprocess.DEVNULL,
                               stdout=subprocess.PIPE, text=True, cwd=lab.checkout)  # fmt: skip
    for line in running.stdout:
        if re.search(r"epoch +1\b", line):
            break
    open_to_members = set()
    for node in NODES:
        listed = at(lab, node, "ss --no-header --listening --tcp --numeric | awk '{print $4}'")
        ports = sorted({int(local.rpartition(":")[2]) for local in listed.split()
                        if not local.startswith(("127.", "[::1]"))})  # fmt: skip
        for each in addresses(lab, node):
            assert answering(lab, "stranger", each, ports, []) == ["tcp 22"]
            reached = answering(lab, address(node % 4 + 1), each, ports, [])
            open_to_members |= {(node, port) for port in reached}
    assert running.poll() is None, "the run was over before the stranger had knocked"
    rest = running.stdout.read()
    assert running.wait() == 0, rest
    # sshd on each, Samba, the store of the first and a listener of Gloo's on each, at least.
    assert len(open_to_members) >= 4 + 1 + 1 + 4, open_to_members


def test_uninstall_leaves_the_disks_as_they_were(cluster):
    lab = cluster.lab
    cluster.play("ansible/playbooks/uninstall.yml", "--tags", "all,network")
    for node in NODES:
        differ = changed_files(lab, node, OF_OTHERS).items() ^ cluster.before[node].items()
        assert sorted({path for path, _ in differ}) == [], node
        left = set(lab.ssh(node, USERS).split()) - cluster.users[node]
        assert left <= {"_chrony"}, left
        assert lab.ssh(node, "sudo nft list tables") == ""
    assert "rc" not in lab.ssh(1, "dpkg-query -W -f '${db:Status-Abbrev}\n'").split()
    assert lab.ssh(1, "dpkg -s samba 2>&1 || true").startswith("dpkg-query: package 'samba' is not")
