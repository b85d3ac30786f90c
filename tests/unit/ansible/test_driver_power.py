"""Power limit and persistence: what a card takes, and the unit that sets it at each boot."""

import jinja2

from planning import driver_power
from tests.unit.ansible.provision_machines import ROOT

CARDS = (
    "NVIDIA GeForce RTX 2080 Ti, 100.00, 280.00, 250.00, Disabled\n"
    "NVIDIA GeForce RTX 2080 Ti, 100.00, 280.00, 200.00, Enabled\n"
)
LAPTOP = "NVIDIA GeForce RTX 3070 Laptop GPU, [N/A], [N/A], [N/A], Disabled\n"


def plan(watts, printed=CARDS, persistence=False):
    return driver_power.power_plan("pc1", persistence, watts, printed)


def test_by_default_nothing_is_changed():
    assert plan(0) == {"persistence": False, "watts": 0, "wrong": []}
    assert plan(0, LAPTOP) == {"persistence": False, "watts": 0, "wrong": []}


def test_a_limit_brings_persistence_and_names_what_is_not_so():
    found = plan(200)
    assert (found["persistence"], found["watts"]) == (True, 200)
    assert found["wrong"] == [
        "the limit of its NVIDIA GeForce RTX 2080 Ti is 250.0 W",
        "its NVIDIA GeForce RTX 2080 Ti is not kept initialised",
    ]
    assert plan(200, CARDS.splitlines()[1])["wrong"] == []
    assert plan(200, "")["wrong"] == []  # no driver yet


def unit(found):
    template = ROOT / "ansible/roles/driver/templates/tandem-gpu.service.j2"
    made = jinja2.Environment(trim_blocks=True).from_string(template.read_text())
    return made.render(ansible_managed="", driver_power=found).splitlines()


def test_the_unit_sets_the_limit_after_persistence():
    start = [line for line in unit(plan(200)) if line.startswith("ExecStart=")]
    assert start == [
        "ExecStart=/usr/bin/nvidia-smi --persistence-mode=1",
        "ExecStart=/usr/bin/nvidia-smi --power-limit=200",
    ]
    assert [line for line in unit(plan(0, persistence=True)) if "limit" in line] == []


def test_the_role_asks_for_what_is_read():
    assert (
        f"driver_power_query: {driver_power.QUERY}\n"
        in (ROOT / "ansible/roles/driver/vars/main.yml").read_text()
    )
