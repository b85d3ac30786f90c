"""Shares mounted by their roles on machines with a kernel of their own: NFS first, then SMB.

One order of events for both, since an emulated machine needs seconds for what others do at once.
NFS also between other releases of Debian: the oldest, whose nfs-utils 1.3.4 is set up in another
way, and the newest, each as server and as client.
"""

import subprocess
import time

import pytest

from tests.lab.site_plays import play, write_inventory

DATA = "/srv/tandem/data"
TREE = "/srv/images"  # a path of the server's own, not under any home
# 200 files of 1 MB that another user owns and nobody else reads, each of its own content.
# One shell of root's for all: on such a machine each sudo takes seconds.
MAKE_TREE = f"""sudo sh -ec '
useradd somebody
mkdir -p {TREE}/train
cd {TREE}/train
head --bytes=1000000 /dev/urandom >/srv/block
for n in $(seq 200); do (echo $n; cat /srv/block) >$n; done
chown -R somebody {TREE}
chmod -R u=rwX,go= {TREE}
# The packages of the emulated machines came with it, and nobody serves by it.
rm -f /etc/samba/smb.conf
'"""
DIGEST = "cd {}/train && cat * | md5sum"
# Makes node2 a stranger in the server's eyes: it asks from another address of its card.
AS_NO_MEMBER = """
sudo ip address add 192.168.56.99/24 dev eth0
sudo ip route replace 192.168.56.111/32 dev eth0 src 192.168.56.99
"""
AS_MEMBER = """
sudo ip route delete 192.168.56.111/32 dev eth0
sudo ip address delete 192.168.56.99/24 dev eth0
"""
PLAY = """
- name: One password before both need it
  hosts: node1
  gather_facts: false
  roles: [{role: share_secret, when: share_protocol == 'smb'}]

- name: Server and client side by side
  hosts: cluster
  strategy: ansible.builtin.free
  gather_facts: true
  gather_subset: ["!all", network]
  roles: [share_client, share_server]

- name: The first reader, and what the server says of itself
  hosts: cluster
  strategy: ansible.builtin.free
  gather_facts: false
  tasks:
    - name: Look at the share
      ansible.builtin.include_role:
        name: "{{ verified_role }}"
        tasks_from: verify

- name: What is broken is named
  hosts: cluster
  strategy: ansible.builtin.free
  gather_facts: false
  tasks:
    - name: Break, and look
      when: share_protocol == 'nfs'
      become: true
      block:
        - name: Break
          ansible.builtin.command: "{{ breaks }}"
          changed_when: true
        - name: Look
          ansible.builtin.include_role:
            name: "{{ verified_role }}"
            tasks_from: verify
      rescue:
        - name: Say what it said
          ansible.builtin.debug:
            msg: FOUND {{ ansible_failed_result.msg }}
      always:
        - name: Mend
          ansible.builtin.command: "{{ mends }}"
          changed_when: true
"""
# By machine: what the last play does there.
SERVER = "verified_role=share_server breaks='exportfs -ua' mends='exportfs -ra'"
CLIENT = (
    "verified_role=share_client breaks='systemctl stop srv-tandem-data.automount' "
    "mends='systemctl start srv-tandem-data.automount'"
)


class Pair:
    """node1 serves, node2 reads."""

    def __init__(self, lab, folder):
        self.lab, self.folder = lab, folder
        (folder / "play.yml").write_text(PLAY)
        lab.ssh(1, MAKE_TREE)
        self.digest = self.read(1, TREE)

    def share(self, protocol: str, cache_gb: int = 0) -> str:
        """One play of both roles, and what it printed."""
        variables = f"share_protocol={protocol} share_host=node1 share_path={TREE}"
        variables += f" share_cache_gb={cache_gb}"
        hosts = {
            "node1": f"ansible_host=192.168.56.111 data_root={TREE} {variables} {SERVER}",
            "node2": f"ansible_host=192.168.56.112 data_root={DATA} {variables} {CLIENT}",
        }
        secret = f"share_secret_folder={self.folder / 'secret'} run_user=tandem node_dir=tandem"
        inventory = write_inventory(self.folder, hosts)
        book = str(self.folder / "play.yml")
        return play(self.lab, book, "-e", secret, "--inventory", inventory).stdout

    def read(self, node: int, folder: str = DATA) -> str:
        """The digest of all 200 MB, as the user who trains reads them, or root on the server."""
        line = DIGEST.format(folder)
        return self.lab.ssh(node, f"sudo sh -c '{line}'" if node == 1 else line)

    def epoch(self) -> int:
        """Reads all once, by a reader that remembers nothing; MB that came over its cable."""
        self.forget()
        before = self.received()
        assert self.read(2) == self.digest
        return (self.received() - before) // 10**6

    def received(self) -> int:
        return int(self.lab.ssh(2, "cat /sys/class/net/eth0/statistics/rx_bytes"))

    def refusal(self, line: str) -> str:
        """The error output of a command line on node2 that must fail."""
        done = self.lab("ssh", "2", "--", line, check=False)
        assert done.returncode != 0, done.stdout
        return done.stderr

    def forget(self) -> None:
        """Unmounts and empties the cache, so that the next reader asks the server."""
        # Not what mounts it at first use, which is there too.
        unmount = "sudo umount --all --types nfs4,cifs"
        self.lab.ssh(2, f"{unmount}; echo 3 | sudo tee /proc/sys/vm/drop_caches")


# Releases of server and client, as `lab up --release` takes them.
NFS = [("bookworm", "nfs"), ("bullseye,trixie", "nfs"), ("trixie,bullseye", "nfs")]
SMB = [("bookworm", "smb")]
BOTH = [NFS[0], *SMB, *NFS[1:]]


@pytest.fixture(scope="module")
def pairs(start_lab, tmp_path_factory):
    """The pair of these releases, the only one that is up."""
    up = {}

    def pair(releases):
        if releases not in up:
            for other in list(up):
                up.pop(other).lab("down")
            words = ["--nodes", "2", "--vm", "--no-bundle", "--release", releases]
            up[releases] = Pair(start_lab("mounts", *words), tmp_path_factory.mktemp("mounts"))
        return up[releases]

    yield pair
    for last in up.values():
        last.lab("down")


@pytest.fixture(scope="module")
def shared(pairs, request):
    releases, protocol = request.param
    pair = pairs(releases)
    pair.said = " ".join(pair.share(protocol).split())
    return pair, protocol


def of(shares):
    """A test of these shares, in this order."""
    ids = ["-".join(one).replace(",", "-to-") for one in shares]
    return pytest.mark.parametrize("shared", shares, indirect=True, ids=ids, scope="module")


@of(BOTH)
def test_every_byte_is_read(shared):
    pair, protocol = shared
    assert pair.read(2) == pair.digest
    found = pair.lab.ssh(2, f"findmnt --noheadings --output FSTYPE,OPTIONS {DATA} | tail -1")
    kind, options = found.split()
    assert {"ro", "nosuid", "nodev"} <= set(options.split(","))
    assert kind == {"nfs": "nfs4", "smb": "cifs"}[protocol]


@of(NFS)
def test_what_is_broken_is_named(shared):
    """By NFS; what of Samba's can break: test_site_share.py."""
    pair, _ = shared
    assert f"FOUND exportfs -s on node1 does not list {TREE}" in pair.said
    assert f"FOUND {DATA} on node2 is not the share 192.168.56.111:{TREE}" in pair.said


@of(BOTH)
def test_nothing_is_written_not_even_by_root(shared):
    pair, protocol = shared
    assert "Read-only file system" in pair.refusal(f"sudo touch {DATA}/train/new")
    # Nor by a client that mounts for writing: it is the server that refuses.
    source = {"nfs": f"192.168.56.111:{TREE}", "smb": "//192.168.56.111/tandem"}[protocol]
    options = {
        "nfs": "-t nfs4 -o rw,vers=4.2",
        "smb": "-t cifs -o rw,credentials=/etc/tandem/share.credentials",
    }[protocol]
    mount = f"sudo mount {options} {source} /mnt"
    said = pair.refusal(f"{mount} && sudo touch /mnt/train/new")
    assert "Read-only file system" in said or "Permission denied" in said
    pair.lab.ssh(2, "sudo umount /mnt")


@of(BOTH)
def test_a_machine_that_is_no_member_is_refused(shared):
    pair, _ = shared
    pair.forget()
    pair.lab.ssh(2, AS_NO_MEMBER)
    try:
        began = time.monotonic()
        assert pair.refusal(f"ls {DATA}/train")
        assert time.monotonic() - began < 60
    finally:
        pair.lab.ssh(2, AS_MEMBER)
    assert pair.lab.ssh(2, f"ls {DATA}/train | wc -l") == "200\n"


@of(BOTH)
def test_a_reader_waits_for_a_server_that_restarts(shared):
    """What docs/shares.md states: a minute after the server is back at most."""
    pair, _ = shared
    pair.forget()
    stamp = "printf '%(%s)T\\n' -1 >&2"  # by its own clock, after each file
    line = f"cd {DATA}/train && for file in *; do cat $file; {stamp}; sleep 0.1; done | md5sum"
    reading = subprocess.Popen(
        pair.lab.argv("ssh", "2", "--", line),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=pair.lab.checkout,
    )
    pair.lab.ssh(2, "until findmnt --types nfs4,cifs; do sleep 1; done")
    began = time.monotonic()
    pair.lab("reboot", "1")
    away = time.monotonic() - began
    assert reading.poll() is None, "the reader was done before the server was down"
    digest, stamps = reading.communicate(timeout=300)
    assert digest == pair.digest
    times = [int(line) for line in stamps.split()]
    longest = max(after - before for before, after in zip(times, times[1:], strict=False))
    assert longest < away + 60


@of(NFS[:1] + SMB)
def test_no_boot_waits_for_a_server_that_is_off_and_the_data_come_with_it(shared):
    """docs/shares.md: a first read fails within half a minute instead of hanging."""
    pair, _ = shared
    for node in (1, 2):
        pair.lab.ssh(node, "sync")
        pair.lab("kill", str(node))
    pair.lab("mend", "2")
    state = pair.lab.ssh(2, "systemctl is-system-running --wait || true").strip()
    assert state in ("running", "degraded")
    # By the machine's own clock, since logging in takes seconds too.
    line = f"began=$(date +%s); ls {DATA}/train && exit 9; echo $(($(date +%s) - began))"
    assert int(pair.lab.ssh(2, line)) <= 30
    pair.lab("mend", "1")
    assert pair.read(2) == pair.digest


@of(NFS[:1] + SMB)
def test_with_a_cache_a_byte_comes_over_the_cable_once_until_the_cache_goes(shared):
    """On machines where cachefilesd is installed, and off, as its package leaves it."""
    pair, protocol = shared
    pair.share(protocol, cache_gb=3)
    first, *later = (pair.epoch() for _ in range(3))
    print(f"{protocol}: {first} MB in the first epoch, then {later}")
    assert first >= 200
    assert max(later) < 20
    pair.share(protocol)
    assert pair.epoch() >= 200
