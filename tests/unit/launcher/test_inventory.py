"""Machines from ansible-inventory's document, and what is wrong with one, in a sentence."""

import json
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from contract import machines
from contract.errors import UserError
from launcher import cli
from launcher.machines import inventory, owned
from tests import fuzz

FILE = Path("inventory.ini")
ANSIBLE = Path(sys.executable).parent / "ansible-playbook"


def document(**hostvars):
    return {"_meta": {"hostvars": hostvars}, "cluster": {"hosts": list(hostvars)}}


def test_hosts_keep_the_inventorys_order_and_their_own_settings():
    first = {"ansible_host": "192.168.56.112", "ansible_port": "2222", "ansible_user": "x"}
    second = {"ansible_host": "fd00::5", "gpus": 4, "run_env": {"NCCL_DEBUG": "INFO"}}
    b, a = inventory.parse(document(b=first, a=second), FILE)
    assert (b.name, b.port, b.user, b.env_python) == ("b", 2222, "x", "/opt/tandem/env/bin/python")
    assert (a.name, a.address, a.gpus, a.env) == ("a", "fd00::5", 4, {"NCCL_DEBUG": "INFO"})


def test_the_user_that_trains_is_train_user_or_else_ansible_user():
    given = {"ansible_host": "192.0.2.1", "ansible_user": "admin"}
    split = {**given, "train_user": "student"}
    hosts = inventory.parse(document(a=given, b=split, c={**given, "train_user": ""}), FILE)
    assert [host.user for host in hosts] == ["admin", "student", "admin"]
    with pytest.raises(UserError, match=r"train_user in inventory\.ini is a template"):
        inventory.parse(document(a={**given, "train_user": "{{ ansible_user }}"}), FILE)


def test_children_of_the_group_count_once():
    found = document(a={"ansible_host": "192.0.2.1"})
    found["cluster"] = {"children": ["rack1", "rack2"]}
    found["rack1"], found["rack2"] = {"hosts": ["a"]}, {"hosts": ["a"]}
    assert [host.name for host in inventory.parse(found, FILE)] == ["a"]


def test_local_paths_are_absolute_and_links_are_kept(tmp_path):
    (host,) = inventory.parse(
        document(a={"ansible_connection": "local", "env_python": ".venv/bin/python"}), FILE
    )
    assert host.address == "127.0.0.1"
    assert host.env_python == str(inventory.CHECKOUT / ".venv/bin/python")


def test_nodes_of_this_machine_keep_their_files_apart_and_out_of_what_is_sent():
    local = {"ansible_connection": "local"}
    listed = document(a=local, b={**local, "node_dir": "tandem"}, c={**local, "node_dir": "/x/n"})
    folders = [host.node_dir for host in inventory.parse(listed, FILE)]
    assert folders == [*(str(inventory.CHECKOUT / ".tandem" / name) for name in "ab"), "/x/n"]


def test_every_bad_host_is_told_at_once():
    bad = {"ansible_host": "192.0.2.1", "gpus": "x"}
    with pytest.raises(UserError) as caught:
        inventory.parse(document(a=bad, b=bad), FILE)
    assert len(caught.value.problems) == 2


def test_group_vars_of_the_checkout_reach_an_inventory_elsewhere(tmp_path, monkeypatch):
    """A foreign locale and a home that cannot be written are no fault."""
    file = tmp_path / "mine.ini"
    file.write_text("[cluster]\na ansible_host=192.0.2.1 gpus=3\n")
    with monkeypatch.context() as patch:
        for name, value in {"LC_ALL": "zh_CN.GB2312", "HOME": "/proc"}.items():
            patch.setenv(name, value)
        found = inventory.read(file)
    assert found["_meta"]["hostvars"]["a"]["data_root"] == "/srv/tandem/data"
    monkeypatch.setattr(inventory, "read", {file: found}.get)  # it takes a second
    (host,) = inventory.load(file)
    assert (host.gpus, host.node_dir) == (3, "tandem")


@pytest.fixture
def listed(tmp_path, monkeypatch):
    """listed(document): a list of machines, and what ansible-inventory (a second) says of it."""

    def make(document):
        done = SimpleNamespace(returncode=0, stdout=json.dumps(document))
        stub = SimpleNamespace(run=lambda *_, **__: done, DEVNULL=subprocess.DEVNULL)
        monkeypatch.setattr(inventory, "subprocess", stub)
        (tmp_path / "mine.ini").touch()
        return tmp_path / "mine.ini"

    return make


def refused(capsys, file, *words):
    assert cli.main(["inventory", f"--inventory={file}", *words]) == 2
    said = capsys.readouterr().err
    assert str(file) in said
    return said


def test_a_list_that_cannot_be_read_is_refused(tmp_path, capsys):
    file = tmp_path / "mine.ini"
    assert "does not exist: type INVENTORY=<file>" in refused(capsys, file)
    file.write_text("[cluster\npc1\n")
    assert "Ansible cannot read the inventory" in refused(capsys, file)


@pytest.mark.parametrize(
    ("machines", "said"),
    [
        ({"pc1": {"owners": "yields"}}, "pc1: in"),
        ({}, "has no hosts in group [cluster]"),
        ({"../x": {}}, "has a machine '../x': file names contain the machine's name"),
    ],
)
def test_a_list_with_which_ansible_would_do_nothing_is_refused(listed, capsys, machines, said):
    assert said in refused(capsys, listed(document(**machines)))


def test_a_limit_to_machines_that_there_are_not_is_refused(listed, capsys):
    file = listed(document(pc1={}, pc2={}))
    for limit in ("pc1,pc2", "cluster", "pc*:!pc2"):
        assert cli.main(["inventory", f"--inventory={file}", f"--limit={limit}"]) == 0
    assert capsys.readouterr().err == ""
    said = refused(capsys, file, "--limit=pc1,pc3")
    assert "does not list pc3. It lists pc1, pc2." in said


def ansible(*words):
    argv, cwd = [ANSIBLE, *words], inventory.CHECKOUT
    return subprocess.run(argv, cwd=cwd, capture_output=True, text=True, check=False)


def test_ansible_itself_refuses_a_list_that_is_not_there(tmp_path):
    """What is typed without make: an empty list would be done with in no time, with success."""
    done = ansible(inventory.CHECKOUT / "site.yml", "-i", tmp_path / "mine.ini")
    assert done.returncode != 0 and "mine.ini" in done.stderr and "PLAY" not in done.stdout


HOST = {
    **{"ansible_host": "192.0.2.1", "ansible_port": 22, "ansible_connection": "ssh"},
    **{"train_user": "tandem", "ansible_user": "admin", "env_python": "/opt/env/bin/python"},
    **{"node_dir": "tandem", "data_root": "/srv", "gpus": 2, "interface": "eno1"},
    **{"cuda_home": "/usr/local/cuda", "run_env": {"A": "b"}},
}
OWNER = {
    **{"owner": "yields", "hours": "19:00-07:30,sat,sun"},
    **{"idle_minutes": "10", "away_dir": "/srv/away"},
}
HOURS = r"([0-2][0-9]:[0-5][0-9]-[0-2][0-9]:[0-5][0-9]|sun|mon)(,[0-9]:30-[0-9]:30){0,2}"


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"ansible_host": "{{ address }}"}, "node1: .*ansible_host.*template"),
        ({"ansible_connection": "docker"}, "node1: .*docker.*local or ssh"),
        ({"ansible_host": "no such name"}, "node1: ssh rejects 'no such name': .*ansible_host"),
        ({"ansible_host": "-oProxyCommand=x"}, "node1: ssh rejects .*ansible_host"),
        ({"ansible_port": 65536}, "ansible_port in .* is '65536', not a whole number from 1 to"),
        ({"gpus": "9" * 5000}, "gpus in .* is '9{40}', not"),
        ({"node_dir": "a\0b"}, "node_dir in .* has an unprintable character"),
        ({"run_env": {"A=B": "x"}}, "has 'A=B': a variable's name has only letters"),
        ({"run_env": {"A": "x\0"}}, "its value has no NUL"),
    ],
)
def test_a_bad_variable_is_named(variables, words):
    with pytest.raises(UserError, match=words):
        inventory.parse(document(node1={**HOST, **variables}), FILE)


@fuzz.many(400)
@example("node1", {**HOST, "node_dir": "{{ x }}"})
@example("node1", {**HOST, "ansible_connection": "winrm"})
@example("node1", {**HOST, "run_env": ["A"]})
@example("node1", {**HOST, **OWNER})
@example("node1", {**HOST, **OWNER, "hours": "24:30-25:00"})
@example("node1", {**HOST, True: "a key that is no text"})
@example("node1", {**HOST, "idle_minutes": 10})
@given(
    st.from_regex(machines.NAME, fullmatch=True),
    fuzz.odd(
        {**HOST, **OWNER}, ("local", "0,1", "a\0b", "{{ x }}", "-1", 65536, {"B": "\0"}, "fe80::1")
    ),
)
def test_odd_variables_are_a_host_or_a_sentence(name, variables):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inventory.socket, "getaddrinfo", lookup)
        try:
            (found,) = inventory.parse(document(**{name: variables}), FILE)
        except UserError as error:
            assert str(error).isprintable() or "\n" in str(error)
            return
    assert Path("nodes", found.name).parent == Path("nodes")
    assert 0 < found.port < 1 << 16 and (found.gpus is None or 0 <= found.gpus <= 64)
    shlex.join([found.env_python, found.node_dir, found.data_root]).encode()
    assert not any("\0" in text for text in (*found.env, *found.env.values()))
    assert 0 < found.owner.idle_seconds <= 86400 and found.owner.away_dir.startswith("/")


@fuzz.many(300)
@example("19:00-07:30,sat,sun")
@example("09:00-12:00,11:59-13:00")
@example("23:00-24:30")
@given(st.from_regex(HOURS, fullmatch=True) | st.text("0123456789:-,satun ", max_size=30))
def test_any_hours_lie_in_a_week_or_are_refused(text):
    try:
        found = owned.read_hours(text)
    except ValueError as error:
        assert str(error).isprintable()
        return
    assert found.spans and all(
        0 <= begin < 7 * owned.DAY and 0 < end - begin <= owned.DAY for begin, end in found.spans
    )


@fuzz.many(200)
@given(st.text(max_size=9) | st.sampled_from(["../x", ".ssh", "a/b", "", "fe80::1", "x" * 999]))
def test_any_name_is_a_machines_or_is_refused(name):
    wrong = machines.name_fault(name)
    if wrong:
        assert wrong.isprintable() and len(wrong) < 1200
    else:
        assert Path("nodes", name).parent == Path("nodes") and not name.startswith(".")


def lookup(address, *_, **__):
    """No name is known, and nobody is asked."""
    address.encode("idna")
    raise socket.gaierror(-2, "Name or service not known")


WRITES = """
- hosts: cluster
  gather_facts: false
  tasks:
    - ansible.builtin.copy: {content: x, dest: "{{ folder }}/{{ inventory_hostname }}"}
"""


@pytest.mark.parametrize("program", ["ansible-playbook", "bootstrap"])
def test_without_make_a_path_is_no_machine(tmp_path, program):
    """Ansible itself would write a file beside the folder that a play names."""
    (tmp_path / "play.yml").write_text(WRITES)
    (tmp_path / "machines.ini").write_text("[cluster]\n../x ansible_connection=local\n")
    (tmp_path / "folder").mkdir()
    words = ["--inventory", tmp_path / "machines.ini"]
    if program == "bootstrap":
        argv, cwd = [sys.executable, "ansible/bootstrap.py", *words], inventory.CHECKOUT
        done = subprocess.run(argv, cwd=cwd, capture_output=True, text=True, check=False)
    else:
        done = ansible(tmp_path / "play.yml", "-e", f"folder={tmp_path}/folder", *words)
    assert done.returncode != 0
    assert "has a machine '../x': file names contain the machine's name" in done.stderr
    assert not (tmp_path / "x").exists() and "Traceback" not in done.stderr


def test_the_list_is_read_while_a_program_beside_it_keeps_the_terminal_from_blocking(tmp_path):
    """As an ssh with the same terminal does."""
    file = tmp_path / "inventory.ini"
    file.write_text("[cluster]\na ansible_connection=local\n")
    argv = [sys.executable, "-m", "launcher", "inventory", f"INVENTORY={file}"]
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    done = subprocess.run(argv, stdin=reader, capture_output=True, text=True)
    os.close(reader), os.close(writer)
    assert done.returncode == 0, done.stderr
