"""A cluster of one user becomes one of two; who trains has no sudo, and leaves nothing."""

import os
import time
import uuid

import pytest

from tests.lab import chaos_standin
from tests.lab.chaos_run import Running, read
from tests.lab.chaos_trial import ORPHANS

NODES = (1, 2)
REFUSED = "sudo -n true 2>/dev/null || echo refused"
ROOT = "sudo -n id -un"
OVERRIDE = "/etc/sudoers.d/zz-lab"


@pytest.fixture(scope="module")
def old(start_lab):
    """Machines on which tandem trains and provisions; keeper is there in the inventory alone."""
    lab = start_lab("users", "--nodes", str(len(NODES)), "--no-bundle")
    for node in NODES:
        chaos_standin.install(lab, node)
    return lab


def keeper(lab, node, line):
    return lab.control("ssh", f"keeper@192.168.56.{110 + node}", line).stdout


def split(lab, folder):
    """`make bootstrap LOGIN=tandem`, which asks for no password; its inventory has two users."""
    hosts = "".join(f"node{n} ansible_host=192.168.56.{110 + n}\n" for n in NODES)
    file = folder / "users.ini"
    users = "[cluster:vars]\nansible_user=keeper\ntrain_user=tandem\n"
    file.write_text(f"[cluster]\n{hosts}{users}")
    words = ["--login=tandem", f"--inventory={file}"]
    return lab.control("python", "ansible/bootstrap.py", *words, check=False)


@pytest.fixture(scope="module")
def two(old, tmp_path_factory):
    """The same machines with two users."""
    done = split(old, tmp_path_factory.mktemp("two"))
    assert done.returncode == 0, done.stdout + done.stderr
    return old


def test_the_old_rule_goes_only_where_the_new_user_was_seen_to_become_root(old, tmp_path):
    old.ssh(2, f"echo 'keeper ALL=(ALL:ALL) PASSWD: ALL' | sudo tee {OVERRIDE}")
    old.ssh(1, "echo kept > of-a-run")
    done = split(old, tmp_path)
    assert "sudo on node2 asks keeper for a password" in " ".join(done.stdout.split()), done.stderr
    assert keeper(old, 1, ROOT) == "root\n"
    assert old.ssh(1, f"{REFUSED}; cat of-a-run") == "refused\nkept\n"
    assert old.ssh(2, ROOT) == "root\n"
    old.ssh(2, f"sudo rm {OVERRIDE}")


def test_split_again_changes_nothing(two, tmp_path):
    for node in NODES:
        assert (keeper(two, node, ROOT), two.ssh(node, REFUSED)) == ("root\n", "refused\n")
    said = split(two, tmp_path).stdout
    assert "changed=0" in said and "changed=1" not in said


@pytest.mark.parametrize("way", ["service", "wardens"])
def test_a_run_without_sudo_leaves_nothing_when_its_guard_is_killed(two, tmp_path, way):
    for node in NODES:
        chaos_standin.take_sudo(two, node, way)
    mark = f"TANDEM_TEST_MARK={uuid.uuid4().hex}"
    file = chaos_standin.inventory(tmp_path, len(NODES), mark, 0.3)
    words = ("--inventory", str(file), "--data", "d", "--epochs", "4")
    run = Running(two, tmp_path, mark, *words)
    try:
        run.wait_for(r"\[node\d \d\] step 3\n", len(NODES))
        guard = run.pids(1)["guard"]
        assert ("/user@" in read(guard, "cgroup")) == (way == "service")
        os.kill(guard, 9)
        limit = time.monotonic() + ORPHANS
        assert run.end() not in (0, None)
        while run.processes() and time.monotonic() < limit:
            time.sleep(0.05)
        assert run.processes() == []
        assert run.attempts()[0]["first_cause"]["host"] == "node1"
    finally:
        run.close()
