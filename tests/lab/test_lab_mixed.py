"""Machines of two Debians with two stacks: training is refused before anything begins."""

import re
from pathlib import Path

import pytest

from tests.lab.site_plays import gather_bundle, play

CHECKOUT = Path(__file__).resolve().parents[2]
# Roles that starting a run does not need and that take half of the time.
SKIPPED = "network,clock,driver,toolkit,pycharm,firewall"


@pytest.fixture(scope="module")
def mixed(start_lab):
    """node1: Debian 12 and the newest torch; node2: Debian 11 and torch 1.12.1."""
    gather_bundle("cu102", "3.9")  # `up` gathers the other
    lab = start_lab("mixed", "--nodes", "2", "--release", "bookworm,bullseye")
    for node, stack in (("node1", "cpu"), ("node2", "cu102")):
        play(lab, "site.yml", "--limit", node, "-e", f"stack={stack}", "--skip-tags", SKIPPED)
    return lab


def runs() -> set[str]:
    """Those of two machines: tests of the other file, in another process, begin some of three."""
    return {path.name for path in (CHECKOUT / "runs").glob("*Z-*-2n")}


def test_each_machine_is_of_its_release(mixed):
    assert mixed("status").stdout.startswith(
        f"lab {mixed.name}: 2 nodes, Debian bookworm, bullseye\n"
    )
    release = ". /etc/os-release; echo $VERSION_CODENAME"
    assert [mixed.ssh(node, release) for node in (1, 2)] == ["bookworm\n", "bullseye\n"]


def test_two_versions_of_torch_are_refused_by_name_and_nothing_begins(mixed):
    before = runs()
    done = mixed.control("python", "-m", "launcher", "train", "--nodes", "2", check=False)
    assert done.returncode == 2
    assert "is missing" not in done.stderr  # the data, for one: versions are what is wrong
    told = r"^tandem: torch differs between machines: (\S+) \(node1\), 1\.12\.1\S* \(node2\): run"
    (newest,) = re.findall(told, done.stderr, re.M)
    assert int(newest.split(".")[0]) >= 2
    assert "Traceback" not in done.stderr
    assert runs() == before
    for node in (1, 2):
        assert "No such file" in mixed.ssh(node, "ls tandem/runs 2>&1 || true")
        assert mixed.ssh(node, "pgrep -fc '[t]orch.distributed' || true") == "0\n"
