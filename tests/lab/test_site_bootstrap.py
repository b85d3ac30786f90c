"""Bootstrap on machines as an installer leaves them: a user with a password, and with sudo."""

import pytest


@pytest.fixture(scope="module")
def bare(start_lab):
    return start_lab("bare", "--nodes", "1", "--bare")


def bootstrap(lab, tmp_path, fingerprint):
    (tmp_path / "fingerprints").write_text(f"node1 {fingerprint}\n")
    (tmp_path / "password").write_text("lab\n")
    options = ["--fingerprints", str(tmp_path / "fingerprints")]
    options += ["--password-file", str(tmp_path / "password"), "--login", "student"]
    command = ("python", "ansible/bootstrap.py", "--limit", "node1,node5", *options)
    return lab.control(*command, check=False)


def test_another_host_key_is_not_trusted_and_nothing_is_changed(bare, tmp_path):
    done = bootstrap(bare, tmp_path, "SHA256:" + "A" * 43)
    assert done.returncode == 1
    assert "node1: the keys differ; nothing was trusted and no password was sent" in done.stderr
    assert "no such user" in bare.ssh(1, "id tandem 2>&1 || true")


def test_the_right_key_lets_in_and_a_second_time_changes_nothing(bare, tmp_path):
    own = bare.ssh(1, "ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub").split()[1]
    done = bootstrap(bare, tmp_path, own)
    assert "NOT LET IN: node5: nothing answers at 192.168.56.115" in done.stderr
    assert "changed=3" in done.stdout
    assert done.returncode == 1  # node5
    whoami = bare.control("ansible", "node1", "-b", "-m", "ansible.builtin.command", "-a", "id -un")
    assert whoami.stdout.splitlines()[-1] == "root"
    assert "changed=0" in bootstrap(bare, tmp_path, own).stdout
    assert bare.ssh(1, "stat -c %a%U /etc/sudoers.d/tandem").strip() == "440root"
