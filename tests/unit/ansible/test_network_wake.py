"""Waking machines: what is recorded while they are on, and the packets that are sent afterwards."""

import json
import socket

import pytest
import yaml

from planning import wake as planned
from tests.unit.ansible.provision_machines import ROOT, load, machine

wake = load("ansible/wake.py")
MAC = "3c:7c:3f:00:00:01"
ETHTOOL = """\
Settings for eno1:
	Speed: 1000Mb/s
	Supports Wake-on: {able}
	Wake-on: {mode}
"""


def test_what_is_recorded_is_of_the_card_that_the_inventory_names():
    record = planned.wake_record(machine(), "192.168.56.111")
    assert record == {"mac": MAC, "broadcast": "192.168.56.255", "address": "192.168.56.111"}


@pytest.mark.parametrize(
    ("able", "mode", "said"),
    [("pumbg", "g", ""), ("pumbg", "d", "was not set"), ("d", "d", "firmware's setup")],
)
def test_a_card_that_will_not_wake_is_told_apart(able, mode, said):
    fault = planned.wake_fault(ETHTOOL.format(able=able, mode=mode))
    assert said in fault and bool(fault) == bool(said)
    assert planned.wake_fault("") != ""  # a card of a virtual machine says nothing


def test_the_packet_is_six_times_ff_and_sixteen_times_the_hardware_address():
    made = wake.packet(MAC)
    assert len(made) == 102 and made[:6] == b"\xff" * 6
    assert {made[6 + 6 * place : 12 + 6 * place] for place in range(16)} == {
        bytes([0x3C, 0x7C, 0x3F, 0, 0, 1])
    }
    with pytest.raises(wake.WakeError, match="no hardware address"):
        wake.packet("3c:7c")


def test_it_is_sent_to_the_recorded_broadcast_address():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver:
        receiver.bind(("127.0.0.1", 0))
        receiver.settimeout(20)
        wake.send({"mac": MAC, "broadcast": "127.0.0.1"}, receiver.getsockname()[1])
        assert receiver.recv(200) == wake.packet(MAC)


def test_who_comes_is_said_and_who_does_not_is_named(monkeypatch, capsys):
    sent = []
    monkeypatch.setattr(wake, "send", lambda row: sent.append(row["address"]))
    monkeypatch.setattr(wake, "answers", lambda address: address == "a" and len(sent) > 2)
    assert wake.wake({"pc1": {"address": "a"}, "pc2": {"address": "b"}}, 0.2, pause=0.01) == ["pc2"]
    assert capsys.readouterr().out.startswith("pc1 answers after")
    assert sent.count("b") > sent.count("a") >= 2  # nothing is sent to one that is there


def test_a_machine_of_which_nothing_is_known_is_named(tmp_path):
    inventory = tmp_path / "inventory.ini"
    for name, of in (("pc1", inventory), ("other", tmp_path / "other.ini")):
        (tmp_path / f"{name}.json").write_text(json.dumps({"inventory": str(of)}))
    assert list(wake.records(tmp_path, inventory, [])) == ["pc1"]
    for limit, folder in ((["pc1", "other"], tmp_path), ([], tmp_path / "none")):
        with pytest.raises(wake.WakeError, match=r"wake_on_lan: true"):
            wake.records(folder, inventory, limit)


def test_uninstall_takes_the_unit_away_without_being_asked_for_the_network():
    plays = yaml.safe_load((ROOT / "ansible/playbooks/uninstall.yml").read_text())
    tasks = [
        task for play in plays if "never" not in play.get("tags", []) for task in play["tasks"]
    ]
    roles = [task.get("ansible.builtin.include_role", {}) for task in tasks]
    assert {"name": "network", "tasks_from": "wake_uninstall"} in roles
