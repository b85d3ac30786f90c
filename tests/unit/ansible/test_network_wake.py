"""Waking machines: what is recorded while they are on, and the packets that are sent afterwards."""

import ipaddress
import json
import re
import socket
import types

import pytest
import yaml

from contract.errors import UserError
from planning import PlanError
from planning import wake as planned
from tests.unit.ansible.provision_machines import (
    ROOT,
    load,
    machine,
    played,
    stand_in,
    tasks_of,
)

wake = load("ansible/wake.py")
MAC = "3c:7c:3f:00:00:01"
ETHTOOL = """\
Settings for eno1:
	Speed: 1000Mb/s
	Supports Wake-on: {able}
	Wake-on: {mode}
"""


@pytest.mark.parametrize("mac", [None, "ff:ff:ff:ff:ff:ff", MAC + "\n", ["a"]])
def test_a_machine_that_gives_no_hardware_address_of_its_own_is_refused(mac):
    facts = machine()
    record = planned.wake_record(facts, "192.168.56.111", "2222")
    assert record == {"mac": MAC, "address": "192.168.56.111", "port": 2222}
    facts["links"][0]["mac"] = mac
    with pytest.raises(PlanError):
        planned.wake_record(facts, "192.168.56.111", 22)


ARMED = ETHTOOL.format(able="pumbg", mode="g")
RECORD = {"mac": MAC, "address": "10.0.0.1", "port": 22, "inventory": "/a/inventory.ini"}
UP = ["enabled", "active"]


@pytest.mark.parametrize(
    ("service", "kept", "wakes"),
    [
        (UP, json.dumps(RECORD), True),
        (["disabled", "active"], json.dumps(RECORD), False),
        (UP, json.dumps({**RECORD, "mac": MAC[::-1]}), False),
        (UP, "", False),
    ],
)
def test_whether_a_machine_will_wake(service, kept, wakes):
    """Other faults, and how they are said: tests/messages/ansible.py."""
    assert (planned.wake_verdict(ARMED, service, kept, RECORD) == "") is wakes


def test_verify_asks_card_service_and_record(tmp_path):
    printed = "printf 'Supports Wake-on: g\\nWake-on: %s\\n' $MODE"
    path = stand_in(tmp_path, ethtool=printed, systemctl="echo ${1#is-} | sed s/-//")
    hosts = {name: {"ansible_host": "192.168.56.111", "mode": name} for name in "gd"}
    record = {"mac": MAC, "address": "192.168.56.111", "port": 22}
    for name in hosts:
        text = json.dumps({**record, "inventory": f"{tmp_path}/hosts.yml"})
        (tmp_path / f"{name}.json").write_text(text)
    variables = {"network_wake_folder": str(tmp_path), "preflight_facts": machine()}
    tasks = (ROOT / "ansible/roles/network/tasks/wake_verify.yml").read_text()
    (tmp_path / "verify.yml").write_text(tasks.replace("become: true", "become: false"))
    play = {
        "name": "Verify", "hosts": "cluster", "gather_facts": False, "vars": variables,
        "environment": {"PATH": path, "MODE": "{{ mode }}"},
        "tasks": [{"ansible.builtin.import_tasks": "verify.yml"}],
    }  # fmt: skip
    _, _, recap = played(tmp_path, [play], 2, hosts).partition("PLAY RECAP")
    assert re.findall(r"(\w) : ok=\d+ .*? failed=(\d)", recap) == [("d", "1"), ("g", "0")]


def test_it_is_sent_to_the_network_of_a_card_of_ours_and_to_no_other():
    networks = [ipaddress.ip_network(text) for text in ("192.168.56.0/24", "192.168.0.0/16")]
    assert wake.broadcast("192.168.56.111", networks) == "192.168.56.255"
    assert wake.broadcast("192.168.7.1", networks) == "192.168.255.255"
    with pytest.raises(UserError, match=r"network of 8\.8\.8\.8"):
        wake.broadcast("8.8.8.8", networks)
    made = wake.packet(MAC)
    assert len(made) == 102 and made[:6] == b"\xff" * 6
    assert made[6:] == bytes([0x3C, 0x7C, 0x3F, 0, 0, 1]) * 16
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver:
        receiver.bind(("127.0.0.1", 0))
        receiver.settimeout(20)
        wake.send(MAC, "127.0.0.1", receiver.getsockname()[1])
        assert receiver.recv(200) == made


def test_networks_are_those_of_this_machines_cards(monkeypatch):
    held = [{"family": "inet", "local": "10.1.2.3", "prefixlen": 20}]
    done = types.SimpleNamespace(stdout=json.dumps([{}, {"ifname": "eno1", "addr_info": held}]))
    monkeypatch.setattr(wake.subprocess, "run", lambda *words, **options: done)
    assert wake.own_networks() == [ipaddress.ip_network("10.1.0.0/20")]
    done.stdout = 'Object "-json" is unknown'
    with pytest.raises(UserError):
        wake.own_networks()


def test_who_comes_is_said_and_who_does_not_is_named(monkeypatch, capsys):
    sent, asked = [], set()
    monkeypatch.setattr(wake, "send", lambda mac, to: sent.append((mac, to)))

    def answers(address, port):
        asked.add((address, port))
        return address == "10.0.0.1" and len(sent) > 2

    monkeypatch.setattr(wake, "answers", answers)
    hosts = {"pc1": ("10.0.0.1", 22), "pc2": ("10.0.0.2", 2222), "far": ("10.9.0.1", 22)}
    rows = {
        name: {"mac": name, "address": address, "port": port}
        for name, (address, port) in hosts.items()
    }
    absent = wake.wake(rows, [ipaddress.ip_network("10.0.0.0/24")], 0.2, pause=0.01)
    assert absent.keys() == {"pc2", "far"} and absent["pc2"] == ""
    assert "no network card of the control node is in the network of 10.9.0.1" in absent["far"]
    assert capsys.readouterr().out.startswith("pc1 answers after")
    assert asked == set(hosts.values()) and {to for _, to in sent} == {"10.0.0.255"}
    names = [mac for mac, _ in sent]
    assert names.count("pc2") > names.count("pc1") >= 2  # nothing is sent to one that is there


def good(inventory):
    return json.dumps({**RECORD, "inventory": str(inventory)})


def test_only_machines_of_this_inventory_that_were_asked_for_are_woken(tmp_path):
    inventory = tmp_path / "inventory.ini"
    for name, of in (("pc1", inventory), ("pc2", inventory), ("other", tmp_path / "other.ini")):
        (tmp_path / f"{name}.json").write_text(good(of))
    found, damaged = wake.records(tmp_path, inventory, [])
    assert list(found) == ["pc1", "pc2"] and damaged == []
    (tmp_path / "pc1.json").write_text("{")
    found, damaged = wake.records(tmp_path, inventory, ["pc2"])
    assert list(found) == ["pc2"] and damaged == []
    # One of which nothing is known is named.
    for limit, folder in ((["pc2", "other"], tmp_path), ([], tmp_path / "none")):
        with pytest.raises(UserError, match=r"wake_on_lan: true"):
            wake.records(folder, inventory, limit)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ({"mac": "3c:7c"}, "3c:7c"),
        ({"port": 70000}, "70000"),
        ({"inventory": None}, "TypeError"),
        ("[" * 200_000, "RecursionError"),
    ],
)
def test_a_damaged_record_is_named_and_the_others_are_woken(
    tmp_path, monkeypatch, capsys, damage, said
):
    inventory = tmp_path / "inventory.ini"
    record = json.loads(good(inventory))
    text = damage if isinstance(damage, str) else json.dumps({**record, **damage})
    (tmp_path / "pc1.json").write_text(text)
    (tmp_path / "pc2.json").write_text(good(inventory))
    monkeypatch.setattr(wake, "RECORDS", tmp_path)
    monkeypatch.setattr(wake, "own_networks", lambda: [ipaddress.ip_network("10.0.0.0/24")])
    sent = []
    monkeypatch.setattr(wake, "send", lambda *words: sent.append(words))
    monkeypatch.setattr(wake, "answers", lambda address, port: bool(sent))
    assert wake.main(["--inventory", str(inventory)]) == 1
    printed = capsys.readouterr()
    assert sent == [(MAC, "10.0.0.255")] and "pc2 answers" in printed.out
    assert f"{tmp_path}/pc1.json is damaged" in printed.err and said in printed.err


def test_uninstall_takes_the_unit_away_without_being_asked_for_the_network():
    plays = yaml.safe_load((ROOT / "ansible/playbooks/uninstall.yml").read_text())
    mine = [play["tasks"] for play in plays if "never" not in play.get("tags", [])]
    roles = [task.get("ansible.builtin.include_role") for rows in mine for task in tasks_of(rows)]
    assert {"name": "network", "tasks_from": "wake_uninstall"} in roles
