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
