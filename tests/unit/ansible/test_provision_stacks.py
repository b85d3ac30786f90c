"""The resolver over recorded machines: every generation of cards on every release."""

import hashlib
import re

import pytest
import yaml

from planning import PlanError, reading, stacks
from tests.unit.ansible.provision_machines import RELEASES, ROOT, TABLE, machine, played

# PCI device numbers (pci.ids) of common cards.
CARDS = {
    "GTX 970": ("13c2", "Maxwell", 52),
    "P100": ("15f8", "Pascal", 60),
    "GTX 1080 Ti": ("1b06", "Pascal", 61),
    "V100": ("1db4", "Volta", 70),
    "RTX 2080 Ti": ("1e07", "Turing", 75),
    "A100": ("20b0", "Ampere", 80),
    "RTX 3090": ("2204", "Ampere", 86),
    "RTX 4090": ("2684", "Ada", 89),
    "H100": ("2330", "Hopper", 90),
    "RTX 5090": ("2b85", "Blackwell", 120),
}
AUTO = dict.fromkeys((52, 60, 61, 70, 75), "cu102")


PREFLIGHT = yaml.safe_load((ROOT / "ansible/roles/preflight/vars/main.yml").read_text())


@pytest.mark.parametrize("name", CARDS)
def test_auto_takes_the_projects_stack_up_to_turing_else_the_newest(name):
    device, generation, sm = CARDS[name]
    row = stacks.find_generation(device, TABLE)
    assert (row["name"], row["sm"]) == (generation, sm)
    for release in sorted(set(RELEASES) - {"ubuntu1804", "ubuntu1804hwe"}):
        chosen = stacks.resolve([machine(release, [device])], "auto", TABLE)
        assert chosen["name"] == AUTO.get(sm, "cu132")


def test_no_gpu_means_cpu_and_a_machine_without_has_no_part_in_the_choice():
    with_card, without = machine(cards=["2204"]), machine(host="node2")
    assert stacks.resolve([without], "auto", TABLE)["name"] == "cpu"
    intel = machine(gpus=[{"vendor": "8086", "device": "9bc5"}])
    off = stacks.resolve([intel], "auto", TABLE, ["node1", "node5"])
    assert off["name"] == "cpu"  # where nobody has a card one that is off blocks nothing
    assert (
        off["reason"]
        == "no machine that answered has an NVIDIA GPU; unknown, because they did not answer: node5"
    )
    chosen = stacks.resolve([with_card, without], "auto", TABLE, ["node1", "node2"])
    assert chosen["name"] == "cu132"
    assert chosen["reason"].endswith("no NVIDIA GPU in node2")


@pytest.mark.parametrize("device", ["128b", "1086"])
def test_a_card_that_no_stack_has_code_for_takes_no_part(device):
    drawing = machine(cards=[device])
    beside, office = machine(cards=[device, "2204"]), machine(cards=[device], host="node2")
    assert stacks.resolve([drawing], "auto", TABLE)["name"] == "cpu"
    chosen = stacks.resolve([beside, office], "auto", TABLE)
    assert (
        chosen["name"] == "cu132"
        and f"node2's {stacks.find_generation(device, TABLE)['name']}" in (chosen["reason"])
    )
    assert [row["sm"] for _, row in stacks.known_gpus(reading.as_machine_facts(beside), TABLE)] == [
        86
    ]


def test_gpus_says_how_many_cards_take_part():
    volta, blackwell = machine(cards=["1db4"]), machine(cards=["2b85"], host="node2")
    with pytest.raises(PlanError):
        stacks.resolve([volta, blackwell], "auto", TABLE)
    without = {**volta, "gpus_counted": reading.read_gpu_count("0", "node1")}
    assert stacks.resolve([without, blackwell], "auto", TABLE)["name"] == "cu132"
    both = machine(cards=["1b06", "2204"])
    one, both = (
        reading.as_machine_facts({**both, "gpus_counted": 1}),
        reading.as_machine_facts(both),
    )
    assert stacks.known_gpus(one, TABLE) == stacks.known_gpus(both, TABLE)[:1]
    for wrong in ("-1", "two", 1.5):
        with pytest.raises(PlanError):
            reading.read_gpu_count(wrong, "node1")


def test_where_cards_are_a_machine_that_is_off_blocks_auto():
    pascal, ampere = machine(cards=["1b06"]), machine(cards=["2204"], host="node2")
    members = ["node1", "node2"]
    for there in ([pascal], [ampere]):
        with pytest.raises(PlanError):
            stacks.resolve(there, "auto", TABLE, members)
        assert stacks.resolve(there, "cu126", TABLE, members)["name"] == "cu126"
    assert stacks.resolve([pascal, ampere], "auto", TABLE, members)["name"] == "cu126"


def test_what_auto_decided_is_kept_whoever_is_on_and_whatever_comes():
    kept = {"stack": "cu126", "path": "/a/inventory.stack.yml"}
    pascal, ampere = machine(cards=["1b06"]), machine(cards=["2204"], host="node2")
    for there in ([pascal], [ampere], [machine(host="node3")]):
        chosen = stacks.resolve(there, "auto", TABLE, ["node1", "node2", "node3"], kept)
        assert (chosen["name"], chosen["reason"]) == ("cu126", "decided before, and kept")
    # A stack that is named goes before the kept one.
    assert stacks.resolve([ampere], "cu132", TABLE, [], kept)["name"] == "cu132"


@pytest.mark.parametrize("text", ["", "stack:", "cu126", "stack: {", "stack: 126\n"])
def test_a_kept_file_that_says_no_stack_is_refused(text):
    found = stacks.read_decision("# a comment\nstack: cu126\n", "x")
    assert found == {"stack": "cu126", "path": "x"}
    with pytest.raises(PlanError):
        stacks.read_decision(text, "/a/pc.stack.yml")


def test_every_way_to_the_kept_file_is_the_same(tmp_path):
    inventory = tmp_path / "pcs.ini"
    inventory.write_text("[cluster]\npc1 ansible_connection=local\n")
    assert stacks.decision_file("") == ""
    path = tmp_path / "pcs.stack.yml"
    assert stacks.decision_file(str(inventory)) == str(path)
    path.write_text("stack: cu126\n")
    (play,) = yaml.safe_load((ROOT / "ansible/playbooks/bundle.yml").read_text())
    play["tasks"] = [{"ansible.builtin.debug": {"msg": "bundle_stack={{ bundle_stack }}"}}]
    role = {**play, "hosts": "cluster", "vars": PREFLIGHT}
    role["tasks"] = [{"ansible.builtin.debug": {"msg": "preflight={{ preflight_kept.stack }}"}}]
    (tmp_path / "group_vars").symlink_to(ROOT / "group_vars")
    said = played(tmp_path, [play, role], inventory=inventory)
    assert "bundle_stack=cu126" in said and "preflight=cu126" in said


def test_one_machine_is_judged_by_the_stack_of_all():
    turing, office = machine(cards=["1e07"]), machine("ubuntu2204", host="node2")
    members, both = ["node1", "node2"], [turing, office]
    assert stacks.predict_stack(both, "auto", TABLE, members) == "cu102"
    # Not known yet, kept or named: nothing is foretold.
    assert stacks.predict_stack([turing], "auto", TABLE, members) == "auto"
    assert (
        stacks.predict_stack(both, "auto", TABLE, members, {"stack": "cu126", "path": "x"})
        == "auto"
    )
    assert stacks.predict_stack(both, "cu132", TABLE, members) == "cu132"


def test_preflight_asks_an_office_pc_by_the_stack_of_all(tmp_path):
    pcs = (machine(cards=["1e07"]), machine("ubuntu2204", host="node2"))
    hosts = {facts["host"]: {"preflight_facts": facts} for facts in pcs}
    asked = {"asked": PREFLIGHT["preflight_question"]["stack"], "stack": "auto"}
    asked["role_path"] = str(ROOT / "ansible/roles/preflight")
    play = {"hosts": "cluster", "gather_facts": False, "vars": {**PREFLIGHT, **asked}}
    play["tasks"] = [{"ansible.builtin.debug": {"msg": "{{ inventory_hostname }}={{ asked }}"}}]
    said = played(tmp_path, [play], inventory=hosts)
    assert "node1=cu102" in said and "node2=cu102" in said


@pytest.mark.parametrize(
    ("driver", "stack"), [("550.163.01", "cu126"), ("590.48.01", "cu132"), (None, "cu132")]
)
def test_auto_prefers_a_stack_that_the_installed_driver_runs(driver, stack):
    ampere = machine(cards=["2204"], driver=driver, driver_library=driver)
    chosen = stacks.resolve([ampere], "auto", TABLE)
    assert chosen["name"] == stack
    assert ("that the installed drivers support" in chosen["reason"]) == (stack == "cu126")


@pytest.mark.parametrize(
    ("release", "stack", "manager", "expected"),
    [
        ("debian12", "cpu", "auto", ("venv", "3.11")),
        ("ubuntu2204", "cpu", "auto", ("conda", "3.11")),
        ("ubuntu2204", "cu102", "auto", ("venv", "3.10")),
        ("debian12", "cpu", "uv", ("uv", "3.11")),
    ],
)
def test_python(release, stack, manager, expected):
    row = dict(TABLE["rows"][stack], name=stack)
    assert (
        stacks.choose_environment(row, reading.as_machine_facts(machine(release)), manager)
        == expected
    )


@pytest.mark.parametrize("name", TABLE["rows"])
def test_every_row_has_its_locks_with_hashes(name):
    row = TABLE["rows"][name]
    for python in row["python"]:
        text = (ROOT / f"ansible/locks/{row['lock']}-py{python}.txt").read_text()
        assert f"torch=={row['torch']} " in text
        assert f"torchvision=={row['torchvision']} " in text
        assert not re.search(r"^apex\b", text, re.MULTILINE)  # PyPI's is another project
        packages = re.findall(r"^\S+==.*?(?=^\S|\Z)", text, re.MULTILINE | re.DOTALL)
        assert len(packages) > 5
        assert all("--hash=sha256:" in package for package in packages)


def test_every_driver_has_a_checksum_of_the_right_length():
    for row in TABLE["drivers"]:
        assert len(row["sha256"] or 64 * "0") == 2 * hashlib.sha256().digest_size
        # Data-centre drivers are in a folder of their own; in XFree86/ they are answered by 404.
        folder = "tesla" if row["branch"] == 440 else "XFree86/Linux-x86_64"
        assert f"download.nvidia.com/{folder}/{row['version']}/" in row["url"]


def packaged(installed, *offered):
    """A 3090 on Ubuntu 20.04 whose driver came from packages, and what its archive offers."""
    own = {f"nvidia-driver-{installed.split('.')[0]}": f"{installed}-0ubuntu0.20.04.1"}
    names = {f"nvidia-driver-{v.split('.')[0]}": f"{v}-0ubuntu0.20.04.1" for v in offered}
    told = {"packages": own, "offered": names, "offered_transitional": {}}
    return machine("ubuntu2004", ["2204"], driver=installed, driver_library=installed, **told)


@pytest.mark.parametrize(
    ("installed", "offered", "stack"),
    [
        ("470.256.02", ["470.256.02", "535.183.01"], "cu126"),  # no 580 by packages
        ("470.256.02", ["470.256.02", "580.126.09"], "cu132"),
        ("470.256.02", [], "cu132"),  # an archive that was not read says nothing
        ("535.183.01", ["580.126.09"], "cu126"),  # what is there already serves
        ("580.126.09", ["535.183.01"], "cu132"),
    ],
)
def test_auto_takes_a_stack_whose_driver_can_be_had_as_the_present_one_was(
    installed, offered, stack
):
    chosen = stacks.resolve([packaged(installed, *offered)], "auto", TABLE)
    assert chosen["name"] == stack
