"""The pairwise check on shaped cables: its figures beside iperf3's, and the slow one named."""

import json
import re

import pytest

from tests.lab.iperf import iperf3
from tests.lab.site_plays import failures, play, write_inventory

HOSTS = {f"node{n}": f"ansible_host=192.168.56.{110 + n}" for n in (1, 2, 3, 4)}


@pytest.fixture(scope="module")
def measured(start_lab, tmp_path_factory):
    """Four machines at 1 Gbit/s, node3 on a 100 Mbit/s cable: the lab, the play and the figures."""
    folder = tmp_path_factory.mktemp("accept")
    lab = start_lab("accept", "--nodes", "4", "--rate", "1gbit", "--no-bundle")
    lab("shape", "100mbit", "3")
    done = play(lab, "ansible/playbooks/accept.yml", "--inventory", write_inventory(folder, HOSTS),
                "-e", f"accept_output={folder / 'figures'}", check=False)  # fmt: skip
    figures = {
        path.stem: json.loads(path.read_text()) for path in (folder / "figures").glob("*.json")
    }
    return lab, done, figures


def test_the_slow_cable_is_named_and_fails_the_check(measured):
    _, done, _ = measured
    said = " ".join(done.stdout.split())
    assert failures(done) == {"node1"}  # the host that reports for all
    (finding,) = set(re.findall(r"(node\d) reaches \d+ Mbit/s at best", said))
    assert finding == "node3"


def test_there_is_a_file_for_each_machine_with_its_three_pairs(measured):
    _, _, figures = measured
    assert sorted(figures) == sorted(HOSTS)
    for host, found in figures.items():
        assert len(found["pairs"]) == 3
        assert all(host in entry["pair"] for entry in found["pairs"])
        assert found["disk"]["mb_per_second"] > 0
        assert {entry["mtu"] for entry in found["pairs"]} == {found["card"]["mtu"]}


def test_bandwidth_is_what_iperf3_finds(measured):
    """Back to back on the same cable, in the two machines' own network namespaces."""
    lab, _, figures = measured
    theirs = iperf3(lab)
    (ours,) = [e["mbit_to"] for e in figures["node1"]["pairs"] if e["pair"] == ["node1", "node2"]]
    assert ours == pytest.approx(theirs, rel=0.03)


def test_nothing_is_left_on_the_machines(measured):
    lab, _, _ = measured
    left = "ls -d /tmp/accept-* /tmp/ansible*accept* ~/.ansible_async 2>/dev/null; true"
    assert lab.ssh(1, left) == ""
