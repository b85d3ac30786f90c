"""From machines that know only a password to a cluster: bootstrap, check, site.yml, again."""

import json
import re

from tests.lab.conftest import bootstrap
from tests.lab.site_plays import write_play

PLAY = ("ansible-playbook", "site.yml")
ROWS = re.compile(r"^(node\d)\s+: ok=\d+\s+changed=(\d+)\s+unreachable=(\d+)\s+failed=(\d+)", re.M)
NOTHING = {f"node{n}": (0, 0, 0) for n in range(1, 6)}


def recap(output):
    """{host: (changed, unreachable, failed)} of Ansible's last lines."""
    rows = ROWS.findall(output)
    return {host: tuple(int(figure) for figure in figures) for host, *figures in rows}


def test_another_host_key_is_not_trusted_and_nothing_is_changed(bare, tmp_path):
    done = bootstrap(bare, tmp_path, [1, 2, 3, 4], "SHA256:" + "A" * 43)
    assert done.returncode == 1
    assert "node1: the keys differ; nothing was trusted and no password was sent" in done.stderr
    assert "NOT LET IN: node5: nothing answers at 192.168.56.115" in done.stderr
    assert "no such user" in bare.ssh(1, "id tandem 2>&1 || true")


def test_the_right_keys_let_in_and_a_second_time_changes_nothing(let_in, tmp_path):
    assert let_in.admin(1, "sudo -n id -un") == "root\n"
    assert let_in.member(1, "sudo -n true 2>/dev/null || echo refused") == "refused\n"
    assert let_in.member(4, "stat -c %a%U /etc/sudoers.d/tandem") == "440root\n"
    again = bootstrap(let_in, tmp_path, [1, 2, 3, 4])
    assert recap(again.stdout) == {f"node{n}": (0, 0, 0) for n in range(1, 5)}


def test_a_password_that_was_given_is_as_good_as_a_sudo_rule(let_in, tmp_path):
    """As -K gives it, which asks at a terminal."""
    (tmp_path / "password").write_text("lab\n")
    book = write_play(tmp_path, ["preflight"], "node1")
    words = ["ansible-playbook", book, "-e", "ansible_user=student"]
    words += ["--connection-password-file", str(tmp_path / "password")]
    refused = let_in.control(*words, check=False)
    assert "sudo asks for a password" in refused.stdout
    words += ["--become-password-file", str(tmp_path / "password")]
    assert recap(let_in.control(*words).stdout)["node1"] == (0, 0, 0)


def test_a_second_user_takes_nothing_from_the_first_and_keeps_its_shell(let_in, tmp_path):
    let_in.admin(2, "sudo useradd --create-home --shell /bin/sh anna")
    words = {"access_user": "anna", "access_key": "ssh-ed25519 " + "A" * 68}
    book = write_play(tmp_path, ["access"], "node2", become=True)
    done = let_in.control("ansible-playbook", book, "-e", json.dumps(words))
    assert recap(done.stdout)["node2"][2] == 0
    assert let_in.member(2, "getent passwd anna").endswith(":/bin/sh\n")
    assert let_in.admin(2, "sudo -n id -un") == "root\n"
    rules = let_in.admin(2, "sudo cat /etc/sudoers.d/tandem").splitlines()
    assert [rule.split()[0] for rule in rules] == ["tandem-admin", "anna"]
    let_in.admin(2, "sudo sed -i /^anna/d /etc/sudoers.d/tandem; sudo userdel --remove anna")


def test_require_all_ends_the_run_before_anything_is_changed(let_in):
    hosts = let_in.member(1, "cat /etc/hosts")
    done = let_in.control(*PLAY, "-e", "require_all=true", check=False)
    assert done.returncode == 2
    assert "require_all is true" in done.stdout
    assert "node5: 192.168.56.115 did not answer: " in done.stdout
    assert let_in.member(1, "cat /etc/hosts") == hosts


def test_nobody_answers(let_in):
    done = let_in.control(*PLAY, "-e", "ansible_port=9", check=False)
    assert done.returncode == 2
    assert "No machine answers; nothing was changed." in done.stdout
    assert "UNREACHABLE!" not in done.stdout  # role reach says it in a sentence


def test_second_run_changes_nothing(provisioned):
    output = provisioned.control(*PLAY).stdout
    assert recap(output) == NOTHING
    assert "SKIPPED: node5: 192.168.56.115 did not answer: " in output
    proven = "node2: products in fp32 on its CPU are right, and so is a sum with"
    assert f"{proven} node1, node3, node4 by gloo" in " ".join(output.split())


def test_members_know_each_other(provisioned):
    for node in (1, 4):
        hosts = provisioned.member(node, "cat /etc/hosts")
        assert not re.search(r"^127\.0\.1\.1", hosts, re.M)
        for member in range(1, 6):
            assert f"192.168.56.{110 + member}\tnode{member}\n" in hosts
        assert provisioned.member(node, "hostname").strip() == f"node{node}"
        known = "ssh-keygen -F node3 -f /etc/ssh/ssh_known_hosts"
        assert provisioned.member(node, known).strip()
    seen = provisioned.member(2, "ssh-keyscan -t ed25519 node3 2>/dev/null").split()[2]
    assert seen in provisioned.member(2, "cat /etc/ssh/ssh_known_hosts")


def test_environment_and_data(provisioned):
    code = "import torch, torchvision as v; print(torch.__version__, v.__version__)"
    for node in (1, 4):
        versions = provisioned.member(node, f'/opt/tandem/env/bin/python -c "{code}"')
        assert re.sub(r"\+\w+", "", versions) == "2.15.0 0.29.2\n"
        images = provisioned.member(node, "find /srv/tandem/data/digits -name '*.png' | wc -l")
        assert images == "1797\n"
        assert provisioned.member(node, "stat -c %U /srv/tandem/data/digits") == "tandem\n"
        json.loads(provisioned.member(node, "iostat -o JSON -d -x"))


def test_the_first_machine_gives_the_others_the_time(provisioned):
    for node in (2, 4):
        assert "192.168.56.111" in provisioned.member(node, "chronyc -c -n tracking").split(",")
    served = provisioned.admin(1, "sudo chronyc -c -n clients")
    assert "192.168.56.114," in served


def test_a_damaged_data_set_is_mended(provisioned):
    image = "/srv/tandem/data/digits/train/0/$(ls /srv/tandem/data/digits/train/0 | head -1)"
    before = provisioned.member(2, f"sha256sum {image}")
    left_over = "/srv/tandem/data/digits/train/0/left-over.png"
    provisioned.member(2, f"echo x > {image}; touch {left_over}")
    provisioned.control(*PLAY, "--limit", "node2", "--tags", "data")
    assert provisioned.member(2, f"sha256sum {image}") == before
    assert "left-over" not in provisioned.member(2, "ls /srv/tandem/data/digits/train/0")
