"""What the bundle must have: by the inventory alone, and by what the machines said."""

from planning import offline
from tests.unit.ansible.provision_machines import load

filters = load("ansible/filter_plugins/tandem.py")
HOSTS = {
    "desk": {"offline": "true", "release": "jammy"},  # as inventory.ini gives it: a string
    "card": {"offline": True, "release": "bookworm", "kernel": "6.1.0-31-amd64"},
    "open": {"offline": False},
    "said": {"offline": "false"},
}


def test_only_machines_that_say_so_are_offline():
    assert filters.offline_hosts(HOSTS, list(HOSTS)) == ["desk", "card"]


def test_packages_for_each_release_and_wheels_for_its_python():
    wanted = offline.bundle_order(HOSTS, ["desk", "card"], "cu126")
    assert wanted["releases"] == {"bookworm": ["linux-headers-6.1.0-31-amd64"], "jammy": []}
    assert wanted["wheels"] == [["cu126", ""], ["cu126", "3.10"], ["cu126", "3.11"]]
    assert wanted["stacks"] == ["cu126"]


def test_apex_brings_the_older_compiler_of_a_release_whose_own_is_too_new():
    hosts = {name: {"release": name} for name in ("focal", "bionic", "jammy")}
    wanted = offline.bundle_order(hosts, [*hosts], "cu102")["releases"]
    assert wanted == {"focal": ["g++-7"], "bionic": [], "jammy": []}
    assert offline.bundle_order(hosts, ["focal"], "cu126")["releases"] == {"focal": []}
    said = {"release": "focal", "python": "3.10", "gpus": True}
    needed = offline.bundle_needed(hosts, ["focal"], {"focal": said}, "cu102")
    assert needed["releases"] == {"focal": ["g++-7"]}


def test_a_kernel_that_a_newer_gcc_built_brings_that_gcc():
    hwe = {"release": "jammy", "kernel": "6.8.0-60-generic"}
    older = {"release": "jammy", "kernel": "5.15.0-139-generic"}
    hosts = {"hwe": hwe, "older": older}
    headers = ["linux-headers-5.15.0-139-generic", "linux-headers-6.8.0-60-generic"]
    assert offline.offline_releases(hosts, ["older"], {}) == {"jammy": headers[:1]}
    assert offline.offline_releases(hosts, ["hwe", "older"], {}) == {"jammy": ["gcc-12", *headers]}


def test_what_a_stack_needs_where_no_python_fits_and_where_nobody_is_offline():
    cpu, cu102 = (offline.bundle_order(HOSTS, ["desk"], stack) for stack in ("cpu", "cu102"))
    assert cpu["wheels"] == [["cpu", ""]]
    # Conda's installer where a release has no fitting Python.
    assert (cpu["conda"], cu102["conda"]) == (True, False)
    wanted = offline.bundle_order(HOSTS, [], "cu102", "3.9")
    assert wanted == {"wheels": [["cu102", "3.9"]], "releases": {}, "stacks": [], "conda": False}
    kept = {"card": {**HOSTS["card"], "driver_policy": "keep"}}
    assert offline.bundle_order(kept, ["card"], "cu102")["stacks"] == []  # its driver is there


def machine(**changes):
    return {"release": "bookworm", "python": "3.11", "gpus": False, **changes}


def test_what_machines_said_asks_for_the_same_packages_as_the_inventory():
    needed = offline.bundle_needed(HOSTS, ["card"], {"card": machine(gpus=True)}, "cu132")
    wanted = offline.bundle_order(HOSTS, ["card"], "cu132")
    assert needed["releases"] == wanted["releases"] and needed["stacks"] == wanted["stacks"]
    assert needed["wheels"] == [["cu132", "3.11"]]
    # Installers are for machines with a card.
    assert offline.bundle_needed(HOSTS, ["card"], {"card": machine()}, "cu132")["stacks"] == []
