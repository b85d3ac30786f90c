"""/etc/hosts and ssh_known_hosts: members' lines are right, everybody else's stay."""

import base64

import pytest

from planning import PlanError, members

ADDRESSES = {"node1": "192.168.56.111", "node2": "192.168.56.112"}
DEBIAN = """127.0.0.1\tlocalhost
127.0.1.1\tnode1.lan node1

# printers
192.168.1.9 printer
::1     ip6-localhost
"""


@pytest.mark.parametrize(
    "text", [DEBIAN, "", "\n127.0.0.1 node1\n127.0.0.1 node2 localhost # x\n\n"]
)
def test_the_hosts_file_comes_back_with_what_others_added(text):
    ours = members.hosts_file(members.hosts_file(text, ADDRESSES), ADDRESSES)
    assert members.former_hosts_file(ours) == text
    assert members.former_hosts_file(ours + "10.9.9.9 new\n") == text + "10.9.9.9 new\n"


WRITTEN = """\
127.0.0.1\tlocalhost
# tandem replaced: 127.0.1.1\tnode1.lan node1
127.0.1.1\tnode1.lan

# printers
192.168.1.9 printer
::1     ip6-localhost
# BEGIN tandem: the members of the cluster
192.168.56.111\tnode1
192.168.56.112\tnode2
# END tandem
"""


def test_hosts_file_is_stable_and_follows_the_inventory():
    """Own names leave the loopback's line, and one of members alone goes."""
    alone = members.hosts_file("127.0.1.1 node1\n", ADDRESSES)
    assert alone.startswith("# tandem removed: 127.0.1.1 node1\n# BEGIN")
    once = members.hosts_file(DEBIAN, ADDRESSES)
    assert once == WRITTEN
    assert members.hosts_file(once, ADDRESSES) == once
    moved = members.hosts_file(once, {"node1": "10.0.0.1"})
    assert "10.0.0.1\tnode1" in moved and "node2" not in moved


@pytest.mark.parametrize("present", [[1], [3, 1]])
def test_known_hosts_stay_as_they_are_when_some_members_are_left_out(present):
    keys = [{"type": kind, "key": "K"} for kind in ("ssh-ed25519", "ssh-rsa")]
    every = {n: {"names": [f"node{n}", f"192.168.56.11{n}"], "keys": keys} for n in (1, 2, 3)}
    text = members.known_hosts_file("github.com ssh-rsa X\n", list(every.values()))
    assert members.known_hosts_file(text, [every[n] for n in present]) == text


def test_a_name_that_leads_elsewhere_is_named():
    right = "192.168.56.111  STREAM node1\n192.168.56.111  DGRAM  \n192.168.56.111  RAW    \n"
    other = right.replace("111", "112").replace("node1", "node2")
    assert members.wrong_names(right + other, ADDRESSES) == []
    wrong = "127.0.1.1       STREAM node2\n127.0.1.1       DGRAM\n" + right + other
    assert members.wrong_names(wrong, ADDRESSES) == ["node2 to 127.0.1.1 instead of 192.168.56.112"]
    assert members.wrong_names(right, ADDRESSES) == ["node2 to nothing instead of 192.168.56.112"]


def key_of(kind):
    """A public key of a type: the base64 of RFC 4253's format."""
    parts = (kind.encode(), bytes(range(32)))
    return base64.b64encode(b"".join(len(p).to_bytes(4, "big") + p for p in parts)).decode()


GOOD = key_of("ssh-ed25519")


def facts(kind="ssh-ed25519", key=GOOD):
    return {"ssh_host_key_ed25519_public_keytype": kind, "ssh_host_key_ed25519_public": key}


def test_a_host_key_is_taken_as_it_is_told():
    assert members.host_keys(facts(), "node1") == [{"type": "ssh-ed25519", "key": GOOD}]


ROGUE = f"{GOOD}\n@cert-authority * ssh-rsa AAAA"
OTHER = key_of("ssh-rsa")


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        *(("ssh-ed25519", key) for key in (ROGUE, f"{GOOD} node2", "AAAA", None, OTHER)),
        *((kind, GOOD) for kind in ("ssh-ed25519\n*", "ssh-dss", None)),
    ],
)
def test_what_is_no_host_key_becomes_no_line(kind, key):
    with pytest.raises(PlanError):
        members.host_keys(facts(kind, key), "node1")
