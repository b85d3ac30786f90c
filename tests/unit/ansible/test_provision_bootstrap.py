"""What bootstrap passes to Ansible, and where the password must not go."""

import dataclasses
import json
import subprocess
from pathlib import Path

import pytest

from contract.errors import UserError
from tests.unit.ansible.provision_machines import load

bootstrap = load("ansible/bootstrap.py")
PC = bootstrap.Machine("pc1", "192.168.56.111", 22, "tandem-admin", "tandem")


@pytest.fixture
def handed(monkeypatch, tmp_path):
    """{"argv", "extra", "passwords"} of the play that bootstrap starts, which is not run."""
    seen = {}

    def run(argv, **_):
        seen["argv"], seen["extra"] = argv, json.loads(argv[argv.index("--extra-vars") + 1])
        secrets = Path(seen["extra"].pop("access_secrets"))
        assert secrets.stat().st_nlink == 0  # in no folder, where a signal could leave it
        seen["passwords"] = json.loads(secrets.read_text())
        seen["secrets"] = secrets
        return subprocess.CompletedProcess(argv, 0)

    (tmp_path / "password").write_text("pass word \n")
    monkeypatch.setattr(bootstrap.subprocess, "run", run)
    monkeypatch.setattr(bootstrap, "list_machines", lambda *_: [PC])
    monkeypatch.setattr(bootstrap, "trust_host_keys", lambda found, _: (found, []))
    monkeypatch.setattr(bootstrap, "read_or_make_control_key", lambda: "ssh-ed25519 KEY")
    monkeypatch.setattr(bootstrap, "needs_no_password", lambda *_: False)
    seen["words"] = ["--login", "anna", "--password-file", str(tmp_path / "password")]
    return seen


def no_terminal(words):
    raise EOFError


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
    found = bootstrap.list_machines(path, "all")
    assert [(one.name, one.address, one.port) for one in found] == [
        ("pc1", "pc1", 2222),
        ("pc2", "192.168.56.112", 22),
    ]
    assert (found[0].provisioning_user, found[0].training_user) == ("anna", "anna")
    with pytest.raises(UserError, match=r"has no hosts in group \[cluster\]"):
        bootstrap.list_machines(inventory(tmp_path, "[others]\nprinter\n"), "all")


@pytest.mark.parametrize(("words", "rule"), [([], "nopasswd"), (["--keep-sudo"], "keep")])
def test_the_play_gets_users_key_and_rule_and_no_password_on_its_command_line(handed, words, rule):
    assert bootstrap.main([*handed["words"], *words]) == 0
    users = {"login": "anna", "provisions": "tandem-admin", "trains": "tandem"}
    assert handed["extra"] == {
        "access_users": {"pc1": users},
        "access_key": "ssh-ed25519 KEY",
        "access_sudo": rule,
    }
    assert handed["passwords"] == {"pc1": "pass word "}
    assert not any("pass word" in word for word in handed["argv"])
    assert not handed["secrets"].exists()


@pytest.mark.parametrize(
    ("given", "provisions", "trains"),
    [
        ({"ansible_user": "keeper", "train_user": "student"}, "keeper", "student"),
        ({"ansible_user": "keeper"}, "keeper", "keeper"),
    ],
)
def test_who_trains_is_train_user_or_else_who_provisions(given, provisions, trains):
    found = bootstrap.make_machine("pc1", given)
    assert (found.provisioning_user, found.training_user) == (provisions, trains)
    with pytest.raises(UserError):  # a template is no name
        bootstrap.make_machine("pc1", {**given, "train_user": "{{ x }}"})


def test_each_machines_password_is_asked_for_where_one_is_needed(monkeypatch):
    pcs = [bootstrap.Machine(f"pc{n}", f"192.0.2.{n}", 22, "a", "t") for n in range(1, 5)]
    monkeypatch.setattr(bootstrap, "needs_no_password", lambda pc, login: pc.name == "pc3")
    typed = {"pc1: ": "one", "pc2 (Enter: the same as on pc1): ": "two"}
    asked = []

    def ask(words):
        asked.append(words.removeprefix("Password of anna on "))
        return typed.get(asked[-1], "")

    assert bootstrap.ask_for_logins(pcs, "anna", ask) == {
        "pc1": ("anna", "one"),
        "pc2": ("anna", "two"),
        "pc3": ("a", ""),
        "pc4": ("anna", "two"),
    }
    assert asked[2:] == ["pc4 (Enter: the same as on pc2): "]


@pytest.mark.parametrize("who", ["keeper", "anna"])
def test_who_gets_in_already_logs_in(monkeypatch, who):
    """The rule of `login` may be gone since an earlier call made the user that provisions."""
    pc = bootstrap.Machine("pc1", "192.0.2.1", 22, "keeper", "anna")
    monkeypatch.setattr(bootstrap, "needs_no_password", lambda _, login: login == who)
    assert bootstrap.ask_for_logins([pc], "anna", ask=None) == {"pc1": (who, "")}


def test_a_password_without_a_terminal_is_asked_for_in_a_sentence(handed, monkeypatch, capsys):
    monkeypatch.setattr(bootstrap.getpass, "getpass", no_terminal)
    assert bootstrap.main(handed["words"][:2]) == 2  # without --password-file
    assert "pc1 asks for anna's password" in capsys.readouterr().err


def test_a_name_that_is_unknown_is_not_a_machine_without_sshd(monkeypatch):
    monkeypatch.setattr(bootstrap, "scan_host_key", lambda _: None)
    typo, dots = (dataclasses.replace(PC, address=name) for name in ("pc1.invalid", "pc1..lab"))
    unknown = "does not know the host name '{0.address}'".format
    told = {typo: unknown(typo), dots: unknown(dots), PC: "apt install openssh"}
    for machine, said in told.items():
        _, (sentence,) = bootstrap.trust_host_keys([machine], None)
        assert said in sentence and ("apt" in sentence) == (machine is PC)


def test_a_key_that_nobody_can_compare_is_not_trusted(monkeypatch):
    key = bootstrap.HostKey("192.0.2.1 ssh-ed25519 KEY", "SHA256:x")
    monkeypatch.setattr(bootstrap, "read_known_keys", lambda _: [])
    with pytest.raises(UserError, match="use --fingerprints"):
        bootstrap.trust_host_key(PC, key, None, no_terminal)


@pytest.mark.parametrize("before", ["", "pc0 ssh-rsa OTHER\n", "pc0 ssh-rsa OTHER"])
def test_a_key_that_was_confirmed_is_a_line_of_its_own(monkeypatch, tmp_path, before):
    key = bootstrap.HostKey("192.0.2.1 ssh-ed25519 KEY", "SHA256:x")
    monkeypatch.setattr(bootstrap, "read_known_keys", lambda _: [])
    monkeypatch.setattr(bootstrap, "SSH_FOLDER", tmp_path)
    (tmp_path / "known_hosts").write_text(before)
    bootstrap.trust_host_key(PC, key, {PC.name: "SHA256:x"}, no_terminal)
    lines = (tmp_path / "known_hosts").read_text().splitlines()
    assert lines == [*before.splitlines(), key.line]


@pytest.mark.parametrize(
    "option, text, said",
    [
        ("--fingerprints", None, "No such file"),
        ("--fingerprints", "pc1\n", "'pc1' is not a machine's name and its fingerprint"),
        ("--password-file", None, "No such file"),
    ],
)
def test_a_file_that_is_no_such_file_changes_nothing(
    handed, monkeypatch, tmp_path, capsys, option, text, said
):
    path = tmp_path / "given"
    if text is not None:
        path.write_text(text)
    monkeypatch.setattr(bootstrap, "trust_host_keys", None)  # not reached
    assert bootstrap.main([option, str(path)]) == 2
    assert said in capsys.readouterr().err and "argv" not in handed
