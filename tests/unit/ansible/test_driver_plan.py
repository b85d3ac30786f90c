"""The driver's plan for a machine without one: what is installed how, and what is refused why."""

import pytest

from tests.unit.ansible.driver_machines import DEBIAN12, UBUNTU, facts, plan, refused
from tests.unit.ansible.provision_machines import RELEASES, TABLE


def test_debian_takes_its_own_packages_for_the_running_kernel():
    chosen = plan(facts(offered=DEBIAN12))
    assert chosen["action"] == "package"
    assert (chosen["version"], chosen["module"], chosen["hold"]) == (
        "535.261.03",
        "proprietary",
        True,
    )
    assert chosen["packages"] == (
        "nvidia-kernel-dkms=535.261.03-1",
        "nvidia-smi=535.261.03-1",
        "libcuda1=535.261.03-1",
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
    names = [text.split("=")[0] for text in chosen["packages"]]
    utilities = branch.removesuffix("-open")
    assert names == [f"nvidia-headless-{branch}", f"nvidia-utils-{utilities}"]
    assert chosen["module"] == module
    assert chosen["tools"][-1] == f"linux-headers-{RELEASES[release][2]}"


def test_packages_that_are_too_old_leave_the_runfile():
    chosen = plan(facts(offered=DEBIAN12), "cu132")
    row = TABLE["drivers"][0]
    assert (chosen["action"], chosen["url"], chosen["sha256"]) == (
        "runfile",
        row["url"],
        row["sha256"],
    )
    assert chosen["flags"] == (
        "--silent",
        "--dkms",
        "--disable-nouveau",
        "--kernel-module-type=open",
    )
    assert "contrib and non-free" in refused(facts(offered=DEBIAN12), "cu132", source="package")


def test_packages_that_do_not_know_the_card_leave_the_runfile():
    blackwell = facts(cards=["5090"], offered=DEBIAN12 | {"nvidia-open-kernel-dkms": "550.1-1"})
    assert plan(blackwell, "cu126")["action"] == "runfile"


def test_pascal_gets_the_proprietary_module_by_runfile():
    chosen = plan(facts(cards=["1080 Ti", "2080 Ti"]))
    assert chosen["flags"][-1] == "--kernel-module-type=proprietary"


def test_no_one_driver_serves_pascal_beside_blackwell():
    assert "no single driver supports Blackwell and Pascal" in refused(
        facts(cards=["1080 Ti", "5090"]), "cu126"
    )


def test_an_own_runfile_comes_before_packages_and_440_has_no_type_of_module():
    mine = "/srv/NVIDIA-Linux-x86_64-440.100.run"
    chosen = plan(facts(offered=DEBIAN12), runfile=mine, runfile_sha256="0" * 64)
    assert (chosen["action"], chosen["url"], chosen["sha256"]) == ("runfile", mine, "0" * 64)
    assert chosen["flags"] == ("--silent", "--dkms", "--disable-nouveau")
    old = {"runfile": mine, "runfile_sha256": "0" * 64}
    assert "older than the 580" in refused(facts(), "cu132", **old)
    assert "does not" not in refused(facts(), runfile="/srv/cuda_10.2.89_440.33.01_linux.run")


@pytest.mark.parametrize(("version", "card"), [("590.48.01", "1080 Ti"), ("550.144.03", "5090")])
def test_an_own_runfile_has_to_know_the_card(version, card):
    mine = {"runfile": f"/srv/NVIDIA-Linux-x86_64-{version}.run", "runfile_sha256": "0" * 64}
    assert f"driver {version} does not support" in refused(facts(cards=[card]), "cu126", **mine)


def test_an_offline_machine_needs_the_runfile_from_the_bundle():
    name = TABLE["drivers"][0]["url"].rpartition("/")[2]
    assert f"bundle/installers/cu102/{name} is missing" in refused(facts(), offline=True)
    assert plan(facts(), offline=True, at_hand=[name])["action"] == "runfile"


def test_a_named_version_is_that_version_or_refused():
    for offered in (DEBIAN12, UBUNTU):
        assert plan(facts(offered=offered), version="580.126.20")["version"] == "580.126.20"
    assert "builds on kernels below 5.6 only" in refused(facts(), version="440.33.01")
    assert "is not in ansible/stacks.yml" in refused(facts(), version="999.1")


def test_nouveau_goes_before_the_runfile_but_not_before_packages():
    assert plan(facts(nouveau=True))["reboot_first"] is True
    assert plan(facts(nouveau=True, offered=DEBIAN12))["reboot_first"] is False


def test_headers_of_another_kernel_do_not_do():
    for offered in (DEBIAN12, {}):
        old = facts(offered=offered, kernel="6.1.0-10-amd64")
        assert "no headers (linux-headers-6.1.0-10-amd64)" in refused(old)
        assert plan(old | {"kernel_headers": True})["action"] != "refuse"


def test_tools_that_the_archive_lacks_are_named():
    made = facts(offered=DEBIAN12)
    del made["offered"]["gcc"]
    assert "building the module needs gcc, which its package archive lacks" in refused(made)
    assert plan(made | {"packages": {"gcc": "4:12.2.0-3"}})["action"] == "package"


# --- what the archive has and cannot install ---------------------------------------------------


GSP = "nvidia-kernel-dkms : Depends: firmware-nvidia-gsp (= 535.261.03) but it is not installable"


def test_debian_without_its_component_of_firmware_says_so_and_takes_the_installer():
    made = facts(offered=DEBIAN12, uninstallable={"nvidia-kernel-dkms": GSP})
    chosen = plan(made)
    assert chosen["action"] == "runfile"
    assert GSP in chosen["reason"] and "component non-free-firmware" in chosen["reason"]
    assert "component non-free-firmware" in refused(made, source="package")


def test_a_branch_that_apt_cannot_install_leaves_the_next_one():
    broken = {name: "Depends: something" for name in UBUNTU if "-580" in name}
    chosen = plan(facts("ubuntu2204", offered=UBUNTU, uninstallable=broken))
    assert chosen["version"] == "535.126.20"


def test_a_headless_machine_gets_a_whole_driver_or_none_of_it():
    """Libraries without a module are not a driver."""
    offered = {name: version for name, version in UBUNTU.items() if "headless" not in name}
    chosen = plan(facts("ubuntu2204", offered=offered))
    assert [text.split("=")[0] for text in chosen["packages"]] == ["nvidia-driver-580-open"]
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


META = "linux-modules-nvidia-580-open-generic-hwe-22.04"
OWN = "linux-modules-nvidia-580-open-6.8.0-60-generic"


def signed(*, coming=(), own=True, display_manager=None, **changes):
    """A machine with Secure Boot whose archive has signed modules, and what apt would bring."""
    made = facts("ubuntu2204", ["2080 Ti"], UBUNTU, display_manager=display_manager,
                 secure_boot=True, kernel_series="generic-hwe-22.04", **changes)  # fmt: skip
    modules = [META, OWN] if own else [META]
    made["offered"] |= dict.fromkeys(modules, "6.8.0-60.63")
    for driver in ("driver", "headless-no-dkms"):
        made["prebuilt"][" ".join([*modules, f"nvidia-{driver}-580-open"])] = [*modules, *coming]
    return made


def names(chosen):
    return [text.split("=")[0] for text in chosen["packages"]]


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


@pytest.mark.parametrize("display_manager", [None, "gdm.service"])
def test_secure_boot_refuses_where_apt_would_build_a_module_beside_the_signed_ones(display_manager):
    made = signed(coming=["dkms", "nvidia-dkms-580-open"], display_manager=display_manager)
    said = refused(made)
    assert f"beside {META} apt would install dkms and nvidia-dkms-580-open" in said
    assert "run again later" in said
    assert plan(made | {"secure_boot": False})["action"] == "package"


def test_secure_boot_prefers_an_older_branch_whose_modules_are_signed():
    made = signed(coming=["nvidia-dkms-580-open"])
    older = "linux-modules-nvidia-535-generic-hwe-22.04"
    made["offered"][older] = "6.8.0-60.63"
    made["prebuilt"][f"{older} nvidia-headless-no-dkms-535"] = [older]
    assert names(plan(made)) == [older, "nvidia-headless-no-dkms-535", "nvidia-utils-535"]


def test_signed_modules_that_apt_cannot_install_are_refused_with_its_reason():
    made = signed()
    made["uninstallable"] = dict.fromkeys(made["prebuilt"], "Depends: nvidia-kernel-common-580")
    assert f"apt cannot install {META} beside nvidia-headless-no-dkms-580-open (Depends: " in (
        refused(made)
    )
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


def test_an_installer_that_cannot_skip_its_test_is_refused_under_secure_boot():
    old = {"runfile": "/srv/NVIDIA-Linux-x86_64-535.261.03.run", "runfile_sha256": "0" * 64}
    said = refused(facts(secure_boot=True), **old)
    assert "installer 535.261.03 loads the module" in said and "550.40.07 and newer" in said
    assert plan(facts(), **old)["action"] == "runfile"


def test_secure_boot_without_signed_packages_goes_by_dkms_where_it_can_sign():
    chosen = plan(facts(offered=DEBIAN12, secure_boot=True))
    assert (chosen["action"], chosen["key"]) == ("package", "/var/lib/dkms/mok.pub")
    bullseye = facts("debian11", secure_boot=True)
    assert "cannot sign" in refused(bullseye)
