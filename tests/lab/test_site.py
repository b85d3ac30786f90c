"""site.yml on real machines: first run, second run, check, machines that do not answer."""

import json
import re
import subprocess
import sys

import pytest

from tests.lab.conftest import CHECKOUT

PLAY = ("ansible-playbook", "site.yml")
ROWS = re.compile(r"^(node\d)\s+: ok=\d+\s+changed=(\d+)\s+unreachable=(\d+)\s+failed=(\d+)", re.M)


def recap(output):
    """{host: (changed, unreachable, failed)} of Ansible's last lines."""
    rows = ROWS.findall(output)
    return {host: tuple(int(figure) for figure in figures) for host, *figures in rows}


@pytest.fixture(scope="session")
def digits():
    folder = CHECKOUT / "data" / "digits"
    if not folder.is_dir():
        subprocess.run([sys.executable, "examples/digits.py", folder], cwd=CHECKOUT, check=True)


@pytest.fixture(scope="module")
def provisioned(lab, digits):
    lab.control(*PLAY)
    return lab


@pytest.fixture(scope="module")
def fresh(start_lab, digits):
    """Two machines that nobody has provisioned."""
    return start_lab("fresh", "--nodes", "2")


def test_check_of_a_fresh_machine_predicts_and_changes_nothing(fresh):
    hosts = fresh.ssh(1, "cat /etc/hosts")
    figures = recap(fresh.control(*PLAY, "--check").stdout)
    assert figures["node1"][0] > 3 and figures["node1"][2] == 0
    assert fresh.ssh(1, "cat /etc/hosts") == hosts
    assert fresh.ssh(1, "ls /opt/tandem/env /srv/tandem 2>&1 || true").count("No such file") == 2


def test_second_run_changes_nothing(provisioned):
    output = provisioned.control(*PLAY).stdout
    assert recap(output) == {
        **{f"node{n}": (0, 0, 0) for n in range(1, 5)},
        "node5": (0, 0, 0),
    }
    assert "NOT PROVISIONED: node5 (192.168.56.115) did not answer. ssh said: " in output


def test_check_of_a_finished_machine_predicts_nothing(provisioned):
    figures = recap(provisioned.control(*PLAY, "--check").stdout)
    assert [row[0] for row in figures.values()] == [0] * 5


def test_members_know_each_other(provisioned):
    for node in (1, 4):
        hosts = provisioned.ssh(node, "cat /etc/hosts")
        assert "\n127.0.1.1" not in hosts
        for member in range(1, 6):
            assert f"192.168.56.{110 + member}\tnode{member}\n" in hosts
        assert provisioned.ssh(node, "hostname").strip() == f"node{node}"
        assert provisioned.ssh(node, "ssh-keygen -F node3 -f /etc/ssh/ssh_known_hosts").strip()
    seen = provisioned.ssh(2, "ssh-keyscan -t ed25519 node3 2>/dev/null").split()[2]
    assert seen in provisioned.ssh(2, "cat /etc/ssh/ssh_known_hosts")


def test_environment_and_data(provisioned):
    code = "import torch, torchvision as v; print(torch.__version__, v.__version__)"
    for node in (1, 4):
        versions = provisioned.ssh(node, f'/opt/tandem/env/bin/python -c "{code}"')
        assert re.sub(r"\+\w+", "", versions) == "2.15.0 0.29.2\n"
        images = provisioned.ssh(node, "find /srv/tandem/data/digits -name '*.png' | wc -l")
        assert images == "1797\n"
        assert provisioned.ssh(node, "stat -c %U /srv/tandem/data/digits") == "tandem\n"
        json.loads(provisioned.ssh(node, "iostat -o JSON -d -x"))


def test_a_foreign_apex_is_refused_by_name(provisioned):
    environment = provisioned.ssh(1, "readlink /opt/tandem/env").strip()
    folder = f"{environment}/lib/python3.11/site-packages/apex"
    provisioned.ssh(1, f"sudo mkdir {folder} && sudo touch {folder}/__init__.py")
    try:
        done = provisioned.control(*PLAY, "--limit", "node1", check=False)
        assert done.returncode == 2
        assert "another project that only shares its name" in " ".join(done.stdout.split())
    finally:
        provisioned.ssh(1, f"sudo rm -r {folder}")


def test_a_damaged_data_set_is_mended(provisioned):
    image = "/srv/tandem/data/digits/train/0/$(ls /srv/tandem/data/digits/train/0 | head -1)"
    before = provisioned.ssh(2, f"sha256sum {image}")
    provisioned.ssh(2, f"echo x > {image}; touch /srv/tandem/data/digits/train/0/left-over.png")
    provisioned.control(*PLAY, "--limit", "node2")
    assert provisioned.ssh(2, f"sha256sum {image}") == before
    assert "left-over" not in provisioned.ssh(2, "ls /srv/tandem/data/digits/train/0")


def test_require_all_ends_the_run_before_anything_is_changed(fresh):
    hosts = fresh.ssh(1, "cat /etc/hosts")
    done = fresh.control(*PLAY, "-e", "require_all=true", check=False)
    assert done.returncode == 2
    assert "require_all is true" in done.stdout and "node3 (192.168.56.113)" in done.stdout
    assert fresh.ssh(1, "cat /etc/hosts") == hosts


def test_nobody_answers(fresh):
    done = fresh.control(*PLAY, "-e", "ansible_port=9", check=False)
    assert done.returncode == 2
    assert "No machine answers; nothing was changed." in done.stdout
