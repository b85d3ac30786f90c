"""What came of an installation and what is held, by what modprobe, nvidia-smi and dpkg say; power
limits; and a reboot."""

import re

import jinja2
import pytest

from planning import driver_result as after
from tests.unit.ansible.driver_machines import by_runfile, facts
from tests.unit.ansible.provision_machines import ROOT


def outcome(smi):
    return after.driver_outcome(by_runfile(), "", smi)


def test_done_is_when_module_and_nvidia_smi_agree_on_every_card():
    """What only a reboot cures, and what nothing here cures: tests/messages/ansible.py."""
    assert outcome({"rc": 0, "text": "535.261.03\n535.261.03\n"})["state"] == "done"
    assert outcome({"rc": 0, "text": "No devices were found"})["state"] == "refuse"
    assert outcome({"rc": 0, "text": "535.300.01\n"})["state"] == "refuse"
    assert outcome({"rc": 9, "text": "535.261.03\n"})["state"] == "refuse"
    mismatch = "Failed to initialize NVML: Driver/library version mismatch\n"
    assert outcome({"rc": 18, "text": mismatch})["state"] == "reboot"


# --- holding ------------------------------------------------------------------------------------

DEBIAN = {
    "nvidia-kernel-dkms": "535.261.03-1",
    "libnvidia-ml1": "535.261.03-1",
    "nvidia-container-toolkit": "1.17.4-1",
    "nvidia-cuda-toolkit": "11.8.89~11.8.0-5~deb12u1",
    "linux-image-amd64": "6.1.129-1",
    "linux-headers-amd64": "6.1.129-1",
    "linux-image-6.1.0-31-amd64": "6.1.128-1",
    "linux-headers-6.1.0-31-common": "6.1.128-1",
    "unattended-upgrades": "2.9.1",
    "dkms": "3.0.10-8",
}
UBUNTU = {
    "nvidia-driver-580-open": "580.126.20-0ubuntu0.22.04.1",
    "linux-modules-nvidia-580-open-6.8.0-60-generic": "6.8.0-60.63~22.04.1",
    "linux-modules-nvidia-580-open-generic-hwe-22.04": "6.8.0-60.63~22.04.1",
    "linux-generic-hwe-22.04": "6.8.0-60.63~22.04.1",
    "linux-image-generic-hwe-22.04": "6.8.0-60.63~22.04.1",
    "linux-image-6.8.0-60-generic": "6.8.0-60.63~22.04.1",
    "linux-modules-extra-6.8.0-60-generic": "6.8.0-60.63~22.04.1",
}


WANTED, CU126 = {"hold_kernel": False}, {"name": "cu126"}
LONE = {"dkms": False, "release": "22.04"}  # of no series


def hold(packages, version, transitional=(), wanted=WANTED, stack=CU126, **known):
    leads = dict.fromkeys(transitional, "nvidia-driver-580-open")
    state = {**facts(), **LONE, "packages": packages, "transitional": leads, **known}
    return after.driver_hold(state, version, wanted, stack)


OF_DEBIAN = {"linux-headers-amd64", "linux-image-amd64"}
OF_UBUNTU = {name for name in UBUNTU if name.startswith("linux-") and "6.8.0-60-g" not in name}
OF_UBUNTU |= {"linux-modules-nvidia-580-open-6.8.0-60-generic"}
BY_DKMS, BUILT = {"kernel_series": "amd64", "dkms": True}, {"kernel_series": "generic-hwe-22.04"}


@pytest.mark.parametrize(
    ("packages", "known", "stays"),
    [
        (DEBIAN, BY_DKMS, False),
        (DEBIAN, {**BY_DKMS, "dkms": False}, True),
        ({name: DEBIAN[name] for name in DEBIAN if name != "linux-headers-amd64"}, BY_DKMS, True),
        (DEBIAN, {**BY_DKMS, "wanted": {"hold_kernel": True}}, True),
        (DEBIAN, {**BY_DKMS, "stack": {"name": "cu102"}}, False),
        (DEBIAN, {**BY_DKMS, "stack": {"name": "cu102"}, "release": "20.04"}, True),
        (UBUNTU, BUILT, False),
        (UBUNTU, {"kernel_series": "generic-hwe-24.04"}, True),
        (UBUNTU, {**BUILT, "transitional": OF_UBUNTU}, True),
    ],
)
def test_a_kernel_is_held_where_its_next_one_gets_no_module(packages, known, stays):
    made = hold(packages, "535.261.03" if packages is not UBUNTU else "580.126.20", **known)
    kernels = (OF_UBUNTU if packages is UBUNTU else OF_DEBIAN) & packages.keys()
    assert kernels & set(made["packages"]) == (kernels if stays else set())
    assert ("linux-" in made["unattended"]) is stays
    driver = {"nvidia-kernel-dkms", "nvidia-driver-580-open"} & packages.keys()
    assert driver and driver <= set(made["packages"])


def test_unattended_upgrades_are_told_every_held_package_and_modules_to_come():
    made = hold(UBUNTU, "580.126.20")
    patterns = re.findall(r'"(.*)";', made["unattended"])
    for name in [*made["packages"], "linux-modules-nvidia-590-generic"]:
        assert any(re.match(pattern, name) for pattern in patterns), name
    for name in ("linux-image-6.8.0-60-generic", "nvidia-driver-580-open-dbgsym"):
        assert not any(re.match(pattern, name) for pattern in patterns), name


def test_what_an_installation_released_that_broke_off_is_held_at_whichever_version_it_is():
    """Half of it has moved: the library is the new one, and a package is half installed."""
    mixed = DEBIAN | {"libnvidia-ml1": "535.300.01-1"}
    released = ["libnvidia-ml1", "nvidia-kernel-dkms", "nvidia-smi"]
    state = {**facts(), **LONE, "packages": mixed}
    made = after.driver_hold(state, "535.300.01", WANTED, CU126, released)
    assert set(released) <= set(made["packages"])
    pin = "Package: nvidia-kernel-dkms\nPin: version 535.261.03-1\nPin-Priority: 999\n"
    assert pin in made["preferences"]
    assert "nvidia-smi" not in made["preferences"] and '"nvidia-smi$"' in made["unattended"]
    fresh = after.driver_hold(state, "535.300.01", WANTED, CU126)
    assert "nvidia-kernel-dkms" not in fresh["packages"]
    none = after.driver_hold(state, "", WANTED, CU126, released)["packages"]
    assert "nvidia-kernel-dkms" in none and "nvidia-container-toolkit" not in none


def test_the_next_kernel_comes_by_its_metapackages():
    image = ["linux-headers-amd64", "linux-image-amd64"]
    assert after.kernel_packages(facts(packages=DEBIAN)) == image
    assert after.kernel_packages(facts(packages=UBUNTU)) == [
        "linux-generic-hwe-22.04",
        "linux-image-generic-hwe-22.04",
        "linux-modules-nvidia-580-open-generic-hwe-22.04",
    ]


CARDS = (
    "NVIDIA GeForce RTX 2080 Ti, 100.00, 280.00, 250.00, Disabled\n"
    "NVIDIA GeForce RTX 2080 Ti, 100.00, 280.00, 200.00, Enabled\n"
)
LAPTOP = "NVIDIA GeForce RTX 3070 Laptop GPU, [N/A], [N/A], [N/A], Disabled\n"


def power(watts, printed=CARDS, persistence=False):
    return after.power_plan("pc1", persistence, watts, printed)


def test_by_default_nothing_is_changed():
    assert power(0) == {"persistence": False, "watts": 0, "wrong": []}
    assert power(0, LAPTOP) == {"persistence": False, "watts": 0, "wrong": []}


def test_a_limit_brings_persistence_and_names_what_is_not_so():
    found = power(200)
    assert (found["persistence"], found["watts"]) == (True, 200)
    assert found["wrong"] == [
        "the limit of its NVIDIA GeForce RTX 2080 Ti is 250.0 W",
        "its NVIDIA GeForce RTX 2080 Ti is not kept initialised",
    ]
    assert power(200, CARDS.splitlines()[1])["wrong"] == []
    assert power(200, "")["wrong"] == []  # no driver yet


def unit(found):
    template = ROOT / "ansible/roles/driver/templates/tandem-gpu.service.j2"
    made = jinja2.Environment(trim_blocks=True).from_string(template.read_text())
    return made.render(ansible_managed="", driver_power=found).splitlines()


def test_the_unit_sets_the_limit_after_persistence():
    start = [line for line in unit(power(200)) if line.startswith("ExecStart=")]
    assert start == [
        "ExecStart=/usr/bin/nvidia-smi --persistence-mode=1",
        "ExecStart=/usr/bin/nvidia-smi --power-limit=200",
    ]
    assert [line for line in unit(power(0, persistence=True)) if "limit" in line] == []


def test_the_role_asks_for_what_is_read():
    assert (
        f"driver_power_query: {after.POWER_QUERY}\n"
        in (ROOT / "ansible/roles/driver/vars/main.yml").read_text()
    )


# --- two systems: a reboot by the role ends in Linux --------------------------------------------

# As grub-mkconfig of Debian 12 writes it, without the contents of the entries.
LINUX = """\
set default="2"
menuentry 'Debian GNU/Linux' --class debian --class gnu-linux --class gnu --class os $menuentry_id_option 'gnulinux-simple-1' {
}
submenu 'Advanced options for Debian GNU/Linux' $menuentry_id_option 'gnulinux-advanced-1' {
	menuentry 'Debian GNU/Linux, with Linux 6.1.0-31-amd64' --class debian --class gnu-linux --class gnu --class os $menuentry_id_option 'gnulinux-6' {
	}
}
"""  # noqa: E501
WINDOWS = """\
menuentry 'Windows Boot Manager (on /dev/nvme0n1p1)' --class windows --class os $menuentry_id_option 'osprober-efi-AA' {
}
"""  # noqa: E501
EFI = "BootCurrent: 0003\nTimeout: 1 seconds\nBootOrder: {}\nBoot0000* Windows Boot Manager\n"


@pytest.mark.parametrize(
    ("grub", "efi", "commands"),
    [
        ("", "", []),
        (LINUX, EFI.format("0003,0000"), []),
        (LINUX + WINDOWS, EFI.format("0003,0000"), [["grub-reboot", "0"]]),
        (WINDOWS + LINUX, "", [["grub-reboot", "1"]]),
        # Windows comes first in the firmware; Linux was chosen by hand at power-on.
        (LINUX, EFI.format("0000,0003"), [["efibootmgr", "--quiet", "--bootnext", "0003"]]),
        (WINDOWS, EFI.format("0003,0000"), []),
    ],
)
def test_the_next_boot_is_linux(grub, efi, commands):
    assert after.linux_again(grub, efi) == commands
