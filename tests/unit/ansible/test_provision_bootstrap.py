"""What bootstrap hands to Ansible, and where the password does not go."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.unit.ansible.provision_machines import load

bootstrap = load("ansible/bootstrap.py")
PC = bootstrap.Machine("pc1", "192.168.56.111", 22, "tandem")


@pytest.fixture
def handed(monkeypatch, tmp_path):
    """{"argv", "password"} of the play that bootstrap starts, which is not run."""
    seen = {}

    def run(argv, **_):
        seen["argv"] = argv
        seen["password"] = Path(argv[argv.index("--connection-password-file") + 1]).read_text()
        return subprocess.CompletedProcess(argv, 0)

    (tmp_path / "password").write_text("secret\n")
    monkeypatch.setattr(bootstrap.subprocess, "run", run)
    monkeypatch.setattr(bootstrap, "machines", lambda *_: [PC])
    monkeypatch.setattr(bootstrap, "settle_all", lambda found, _: (found, []))
    monkeypatch.setattr(bootstrap, "control_key", lambda: "ssh-ed25519 KEY")
    seen["words"] = ["--login", "anna", "--password-file", str(tmp_path / "password")]
    return seen


def inventory(tmp_path, text):
    path = tmp_path / "inventory.ini"
    path.write_text(text)
    return str(path)


def test_machines_of_child_groups_are_machines_of_the_cluster(tmp_path):
    path = inventory(
        tmp_path,
        "[new]\npc2 ansible_host=192.168.56.112\n[old]\npc1 ansible_user=anna ansible_port=2222\n"
        "[cluster:children]\nold\nnew\n[others]\nprinter\n",
    )
    found = bootstrap.machines(path, "all")
    assert [(one.name, one.address, one.port) for one in found] == [
        ("pc1", "pc1", 2222),
        ("pc2", "192.168.56.112", 22),
    ]
    assert found[0].user == "anna"
    assert [one.name for one in bootstrap.machines(path, "pc2")] == ["pc2"]


def test_an_inventory_without_a_cluster_is_named(tmp_path):
    with pytest.raises(bootstrap.BootstrapError, match="no machine in its group `cluster`"):
        bootstrap.machines(inventory(tmp_path, "[others]\nprinter\n"), "all")


@pytest.mark.parametrize(("words", "rule"), [([], "nopasswd"), (["--keep-sudo"], "keep")])
def test_the_play_gets_users_key_and_rule(handed, words, rule):
    assert bootstrap.main([*handed["words"], *words]) == 0
    extra = json.loads(handed["argv"][handed["argv"].index("--extra-vars") + 1])
    assert extra == {
        "ansible_user": "anna",
        "access_users": {"pc1": "tandem"},
        "access_key": "ssh-ed25519 KEY",
        "access_sudo": rule,
    }


def test_the_password_is_on_no_command_line(handed):
    bootstrap.main(handed["words"])
    assert handed["password"] == "secret"
    assert not any("secret" in word for word in handed["argv"])
