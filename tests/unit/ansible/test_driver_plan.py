"""The driver's plan for a machine without one: what is installed how. Refusals: refusals.py."""

import pytest

from tests.unit.ansible.driver_machines import (
    DEBIAN12,
    META,
    OWN,
    UBUNTU,
    facts,
    names,
    plan,
    signed,
)
from tests.unit.ansible.provision_machines import RELEASES, TABLE


def test_debian_takes_its_own_packages_for_the_running_kernel():
    chosen = plan(facts(offered=DEBIAN12))
    assert chosen["action"] == "package"
    assert (chosen["version"], chosen["module"]) == ("535.261.03", "proprietary")
    assert chosen["hold"] is True and chosen["packages"] == tuple(
        f"{name}=535.261.03-1" for name in ("nvidia-kernel-dkms", "nvidia-smi", "libcuda1")
    )
    assert chosen["tools"] == ("dkms", "gcc", "make", "linux-headers-6.1.0-31-amd64")


def test_a_desktop_gets_the_drawing_half_too():
    desktop = facts(offered=DEBIAN12, display_manager="gdm.service")
    assert "nvidia-driver=535.261.03-1" in plan(desktop)["packages"]
    desktop = facts("ubuntu2204", offered=UBUNTU, display_manager="gdm.service")
    assert plan(desktop)["packages"] == ("nvidia-driver-580-open=580.126.20-0ubuntu0.22.04.1",)


def test_a_desktop_gets_a_desktops_branch_and_a_server_the_newest():
    """Ubuntu 20.04 has 535 for desktops, and 570 for servers alone."""
    focal = {
        name: version for name, version in UBUNTU.items() if "580" not in name and "610" not in name
    }
    focal |= {name.replace("535", "570"): "570.86.15-0ubuntu0.20.04.5"
              for name in focal if "535-server" in name}  # fmt: skip
    desktop = facts("ubuntu2004", offered=focal, display_manager="gdm3.service")
    assert plan(desktop)["packages"] == ("nvidia-driver-535=535.126.20-0ubuntu0.22.04.1",)
    assert plan(facts("ubuntu2004", offered=focal))["version"] == "570.86.15"


@pytest.mark.parametrize(
    ("cards", "stack", "branch", "module"),
    [
        (["1080 Ti"], "cu102", "580", "proprietary"),
        (["2080 Ti"], "cu102", "580-open", "open"),
        (["1080 Ti", "2080 Ti"], "cu102", "580", "proprietary"),
        (["3090"], "cu132", "580-open", "open"),
        (["5090"], "cu132", "580-open", "open"),
    ],
)
@pytest.mark.parametrize("release", ["ubuntu1804", "ubuntu2204", "ubuntu2404"])
def test_ubuntu_takes_the_tables_branch_and_the_module_of_its_cards(
    release, cards, stack, branch, module
):
    chosen = plan(facts(release, cards, UBUNTU), stack)
    utilities = branch.removesuffix("-open")
    assert names(chosen) == [f"nvidia-headless-{branch}", f"nvidia-utils-{utilities}"]
    assert chosen["module"] == module
    assert chosen["tools"][-1] == f"linux-headers-{RELEASES[release][2]}"


def test_packages_that_are_too_old_leave_the_runfile():
    chosen = plan(facts(offered=DEBIAN12), "cu132")
    row = TABLE["drivers"][0]
    assert chosen["action"] == "runfile"
    assert (chosen["url"], chosen["sha256"]) == (row["url"], row["sha256"])
    flags = ("--silent", "--dkms", "--disable-nouveau", "--kernel-module-type=open")
    assert chosen["flags"] == flags
    # Nor do those do that do not know the card.
    blackwell = facts(cards=["5090"], offered=DEBIAN12 | {"nvidia-open-kernel-dkms": "550.1-1"})
    assert plan(blackwell, "cu126")["action"] == "runfile"


def test_pascal_gets_the_proprietary_module_by_runfile():
    chosen = plan(facts(cards=["1080 Ti", "2080 Ti"]))
    assert chosen["flags"][-1] == "--kernel-module-type=proprietary"


def test_an_own_runfile_comes_before_packages_and_440_has_no_type_of_module():
    mine = "/srv/NVIDIA-Linux-x86_64-440.100.run"
    chosen = plan(facts(offered=DEBIAN12), runfile=mine, runfile_sha256="0" * 64)
    assert (chosen["action"], chosen["url"], chosen["sha256"]) == ("runfile", mine, "0" * 64)
    assert chosen["flags"] == ("--silent", "--dkms", "--disable-nouveau")


def test_an_offline_machine_takes_the_runfile_from_the_bundle():
    name = TABLE["drivers"][0]["url"].rpartition("/")[2]
    assert plan(facts(), offline=True, at_hand=[name])["action"] == "runfile"


def test_a_named_version_is_that_version():
    for offered in (DEBIAN12, UBUNTU):
        assert plan(facts(offered=offered), version="580.126.20")["version"] == "580.126.20"


def test_nouveau_goes_before_the_runfile_but_not_before_packages():
    assert plan(facts(nouveau=True))["reboot_first"] is True
    assert plan(facts(nouveau=True, offered=DEBIAN12))["reboot_first"] is False


def test_what_building_needs_may_be_there_already():
    for offered in (DEBIAN12, {}):
        old = facts(offered=offered, kernel="6.1.0-10-amd64")
        assert plan(old | {"kernel_headers": True})["action"] != "refuse"
    made = facts(offered=DEBIAN12)
    del made["offered"]["gcc"]
    assert plan(made | {"packages": {"gcc": "4:12.2.0-3"}})["action"] == "package"


# --- what the archive has and cannot install ---------------------------------------------------


GSP = "nvidia-kernel-dkms : Depends: firmware-nvidia-gsp (= 535.261.03) but it is not installable"


def test_debian_without_its_component_of_firmware_says_so_and_takes_the_installer():
    chosen = plan(facts(offered=DEBIAN12, uninstallable={"nvidia-kernel-dkms": GSP}))
    assert chosen["action"] == "runfile"
    assert GSP in chosen["reason"] and "component non-free-firmware" in chosen["reason"]


def test_a_branch_that_apt_cannot_install_leaves_the_next_one():
    broken = {name: "Depends: something" for name in UBUNTU if "-580" in name}
    chosen = plan(facts("ubuntu2204", offered=UBUNTU, uninstallable=broken))
    assert chosen["version"] == "535.126.20"


def test_a_headless_machine_gets_a_whole_driver_or_none_of_it():
    """Libraries without a module are not a driver."""
    offered = {name: version for name, version in UBUNTU.items() if "headless" not in name}
    assert names(plan(facts("ubuntu2204", offered=offered))) == ["nvidia-driver-580-open"]
    rest = {name: version for name, version in offered.items() if "driver" not in name}
    assert plan(facts("ubuntu2204", offered=rest))["action"] == "runfile"


def test_a_transitional_package_is_no_offer():
    """Ubuntu's nvidia-driver-575 brings 580 by now, and so does nvidia-driver-535 535.309.01."""
    moved = {"nvidia-driver-575": "580.126.09-0ubuntu0.22.04.1",
             "nvidia-driver-535": "535.309.01-0ubuntu0.22.04.1"}  # fmt: skip
    made = facts("ubuntu2204", ["1080 Ti"], UBUNTU | moved, display_manager="gdm.service")
    made["offered_transitional"] = dict.fromkeys(moved, "nvidia-driver-580")
    chosen = plan(made)
    assert chosen["packages"] == ("nvidia-driver-580=580.126.20-0ubuntu0.22.04.1",)
    assert plan(made, version="535.309.01")["version"] != "535.309.01"


def test_the_branch_of_a_package_is_that_of_its_version():
    # What counts is the version that it brings, whatever its name says.
    older = {name: version for name, version in UBUNTU.items() if "-535" in name}
    beyond = {
        f"nvidia-{part}-570": "595.71.05-0ubuntu1" for part in ("driver", "headless", "utils")
    }
    assert plan(facts("ubuntu2204", offered=older | beyond))["version"] == "535.126.20"


TESLA = dict.fromkeys(
    ("nvidia-tesla-470-kernel-dkms", "nvidia-tesla-470-smi", "nvidia-tesla-470-driver",
     "libnvidia-tesla-470-cuda1"),
    "470.256.02-1~deb12u1",
)  # fmt: skip


def test_kepler_gets_debians_packages_of_its_last_branch():
    """Debian 12's nvidia-tesla-470-*; its own branch, 535, knows no Kepler."""
    k80 = facts("debian12", offered=DEBIAN12 | TESLA) | {
        "gpus": [{"vendor": "10de", "device": "102d"}] * 2
    }
    assert names(plan(k80)) == [*list(TESLA)[:2], "libnvidia-tesla-470-cuda1"]
    assert "nvidia-tesla-470-driver" in names(plan(k80 | {"display_manager": "gdm.service"}))
    assert plan(k80)["version"] == "470.256.02" and plan(k80)["module"] == "proprietary"
    for card in ("2080 Ti", "1080 Ti"):  # of the same release, newer cards get the newer branch
        assert names(plan(facts(cards=[card], offered=DEBIAN12 | TESLA)))[0] == "nvidia-kernel-dkms"


# --- the kernel that runs, and the one that waits -----------------------------------------------


def test_a_kernel_of_a_newer_gcc_than_the_machines_gets_that_gcc():
    hwe = facts("ubuntu2204", offered=UBUNTU | {"gcc-12": "12.3.0"}, kernel_compiler="12")
    for gcc, packaged in (("11.4.0", "4:12.2.0"), (None, "4:11.2.0-1ubuntu1")):
        hwe["offered"]["gcc"] = packaged
        chosen = plan(hwe | {"gcc": gcc})
        assert chosen["compiler"] == "gcc-12" and "gcc-12" in chosen["tools"]
    assert plan(hwe | {"gcc": "12.3.0"})["compiler"] == ""
    assert plan(hwe | {"gcc": "13.1.0"})["compiler"] == ""  # a newer one knows all options
    assert plan(hwe | {"gcc": "11.4.0", "offered": {**UBUNTU, **hwe["offered"]}})["tools"]


def test_a_kernel_that_waits_gets_its_module_too():
    newer = {"waiting_kernel": "6.1.0-50-amd64"}
    had = {**DEBIAN12, "linux-headers-6.1.0-50-amd64": "1"}
    chosen = plan(facts(offered=had, **newer))
    assert chosen["waiting"] == "6.1.0-50-amd64" and chosen["reboot_first"] is False
    assert "linux-headers-6.1.0-50-amd64" in chosen["tools"]
    assert plan(facts(offered=DEBIAN12, **newer))["waiting"] == ""


def test_a_kernel_without_headers_goes_where_one_that_has_them_waits():
    archive = {**DEBIAN12, "linux-headers-6.1.0-50-amd64": "1"}
    made = facts(offered=archive, kernel="6.1.0-10-amd64", waiting_kernel="6.1.0-50-amd64")
    for chosen in (plan(made), plan(made, source="runfile")):
        assert chosen["action"] in ("package", "runfile") and chosen["reboot_first"] is True
    after = made | {"kernel": "6.1.0-50-amd64", "waiting_kernel": None}
    assert plan(after)["reboot_first"] is False


# --- Secure Boot --------------------------------------------------------------------------------


def test_secure_boot_takes_the_series_metapackage_of_signed_modules():
    """The modules of one kernel alone do not stand for nvidia-dkms, which apt would add."""
    headless = plan(signed())
    assert names(headless) == [META, OWN, "nvidia-headless-no-dkms-580-open", "nvidia-utils-580"]
    desktop = plan(signed(display_manager="gdm.service"))
    assert names(desktop) == [META, OWN, "nvidia-driver-580-open"]
    assert headless["tools"] == desktop["tools"] == ()
    older = plan(signed(own=False))  # afterwards the metapackage's kernel is booted
    assert names(older)[:2] == [META, "nvidia-headless-no-dkms-580-open"]
    assert plan(signed() | {"secure_boot": False})["tools"] != ()


def test_secure_boot_prefers_an_older_branch_whose_modules_are_signed():
    made = signed(coming=["nvidia-dkms-580-open"])
    older = "linux-modules-nvidia-535-generic-hwe-22.04"
    made["offered"][older] = "6.8.0-60.63"
    made["prebuilt"][f"{older} nvidia-headless-no-dkms-535"] = [older]
    assert names(plan(made)) == [older, "nvidia-headless-no-dkms-535", "nvidia-utils-535"]


def test_signed_modules_that_do_not_go_with_the_driver_matter_under_secure_boot_alone():
    """With it that is refused: refusals.py."""
    coming = signed(coming=["dkms", "nvidia-dkms-580-open"])
    assert plan(coming | {"secure_boot": False})["action"] == "package"
    made = signed()
    made["uninstallable"] = dict.fromkeys(made["prebuilt"], "Depends: nvidia-kernel-common-580")
    other = made | {"kernel_series": None, "prebuilt": {}}  # no signed ones for its kernel
    assert plan(other)["action"] == "package"


def test_a_new_kernel_gets_signed_modules_where_the_old_one_had_them():
    had = {"nvidia-headless-no-dkms-580-open": "580.126.20-0ubuntu1",
           "linux-modules-nvidia-580-open-6.8.0-50-generic": "6.8.0-50.51"}  # fmt: skip
    made = facts("ubuntu2204", ["2080 Ti"], UBUNTU, packages=had)
    assert plan(made)["action"] == "build"
    made["offered"]["linux-modules-nvidia-580-open-6.8.0-60-generic"] = "6.8.0-60.63"
    chosen = plan(made)
    assert chosen["action"] == "package"
    assert chosen["packages"] == ("linux-modules-nvidia-580-open-6.8.0-60-generic=6.8.0-60.63",)
    # Of a branch that has ended only a name is left, by which no module is chosen.
    ended = "linux-modules-nvidia-535-generic-hwe-22.04"
    made["packages"][ended] = "6.8.0-50.51"
    made["transitional"][ended] = "linux-modules-nvidia-580-generic-hwe-22.04"
    made["offered"]["linux-modules-nvidia-535-6.8.0-60-generic"] = "6.8.0-60.63"
    assert plan(made)["packages"] == chosen["packages"]


@pytest.mark.parametrize(
    ("release", "key"),
    [("debian12", ("/var/lib/dkms/mok.key", "/var/lib/dkms/mok.pub")),
     ("ubuntu2204", ("/var/lib/shim-signed/mok/MOK.priv", "/var/lib/shim-signed/mok/MOK.der"))],
)  # fmt: skip
def test_the_installer_signs_under_secure_boot_and_does_not_load_what_it_built(release, key):
    made = facts(release, ["3090"], secure_boot=True)
    chosen = plan(made, "cu132")
    assert chosen["action"] == "runfile" and chosen["key"] == key[1]
    assert chosen["flags"][-3:] == (
        f"--module-signing-secret-key={key[0]}",
        f"--module-signing-public-key={key[1]}",
        "--skip-module-load",
    )
    without = plan(made | {"secure_boot": False}, "cu132")
    assert without["key"] == "" and not any("sign" in flag for flag in without["flags"])


def test_secure_boot_without_signed_packages_goes_by_dkms_where_it_can_sign():
    chosen = plan(facts(offered=DEBIAN12, secure_boot=True))
    assert (chosen["action"], chosen["key"]) == ("package", "/var/lib/dkms/mok.pub")
