"""By which of several network cards the machines should be listed."""

import copy

import pytest

from planning import preflight
from tests.unit.ansible.provision_machines import machine

network = preflight.network


def two_cards(number, fast=2500, network="10.0.2"):
    """A machine that is listed by its gigabit card, and has a second one."""
    own = copy.deepcopy(machine()["links"][0])
    own.update(addresses=[f"192.168.56.{number}"], networks=[f"192.168.56.{number}/24"])
    second = {**own, "name": "enp5s0", "speed": fast, "addresses": [f"{network}.{number}"]}
    second["networks"] = [f"{network}.{number}/24"]
    return machine(host=f"pc{number}", links=[own, second])


def test_a_faster_network_that_all_are_in_is_proposed():
    found = network.faster_cards([two_cards(1), two_cards(2, fast=10000)])
    assert [row["host"] for row in found] == ["pc1", "pc2"]
    assert {row["fault"] for row in found} == {"faster_card"} <= preflight.NOTES
    assert network.cluster([two_cards(1), two_cards(2)])[-1]["fault"] == "faster_card"


@pytest.mark.parametrize(
    "machines",
    [
        [two_cards(1)],
        [two_cards(1), two_cards(2, network="10.0.3")],  # not one network
        [two_cards(1), two_cards(2, fast=1000)],  # the slowest card of a network is its speed
        [two_cards(1), two_cards(2, fast=None)],
        [two_cards(1), machine(host="pc2")],
        [two_cards(1), machine(host="pc2", interface=None)],
    ],
)
def test_no_faster_network_no_proposal(machines):
    assert network.faster_cards(machines) == []
