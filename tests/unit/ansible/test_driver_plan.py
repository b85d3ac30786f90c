"""The driver's plan over recorded machines: what is installed how, and what is refused why."""

import pytest

from tests.unit.ansible.provision_machines import RELEASES, TABLE, load, machine

driver = load("ansible/filter_plugins/driver.py")

# Drivers by packages, as the archives of November 2026 have them.
DEBIAN12 = {
    "nvidia-kernel-dkms": "535.261.03-1",
    "nvidia-open-kernel-dkms": "535.261.03-1",
    "nvidia-smi": "535.261.03-1",
    "nvidia-driver": "535.261.03-1",
    "libcuda1": "535.261.03-1",
}
UBUNTU = {
    f"nvidia-{part}-{branch}{kind}": f"{branch}.126.20-0ubuntu0.22.04.1"
    for branch in (470, 535, 580, 610)
    for part in ("driver", "headless", "headless-no-dkms", "utils")
    for kind in ("", "-open", "-server", "-server-open")
}
TOOLS = {"dkms": "3.0.10-8", "gcc": "4:12.2.0-3", "make": "4.3-4.1"}
PCI = {"1080 Ti": "1b06", "2080 Ti": "1e07", "3090": "2204", "4090": "2684", "5090": "2b85"}
WISH = {
    "policy": "install",
    "source": "auto",
    "version": "auto",
    "allow_stop_display": False,
    "runfile": "",
    "runfile_sha256": "",
    "offline": False,
    "at_hand": [],
}


def facts(release="debian12", cards=("2080 Ti",), offered=None, **changes):
    """A recorded machine without a driver, headers at hand."""
    made = machine(release, [PCI[card] for card in cards], driver=None, driver_library=None)
    made.update(
        packages={},
        held=[],
        offered=TOOLS | {f"linux-headers-{made['kernel']}": "1"} | (offered or {}),
        runfile=None,
        module=None,
        pending=False,
        signing_key=None,
        displays=[],
        gpu_processes=[],
        display_manager=None,
        display_manager_active=False,
        free=dict.fromkeys(driver.SPACE, 9e10),
    )
    made.update(changes)
    return made


def plan(recorded, stack="cu102", **wish):
    row = dict(TABLE["rows"][stack], name=stack)
    return driver.driver_plan(recorded, WISH | wish, row, TABLE)


def refused(recorded, stack="cu102", **wish):
    made = plan(recorded, stack, **wish)
    assert made["action"] == "refuse", made
    return f"{made['reason']}; {made['remedy']}"


def packaged(version="535.261.03", **changes):
    """Debian with its packaged driver installed and loaded."""
    names = {name: f"{version}-1" for name in DEBIAN12 if name != "nvidia-open-kernel-dkms"}
    state = {"driver": version, "driver_library": version, "module": version, "packages": names}
    return facts(**({"offered": DEBIAN12} | state | changes))


def by_runfile(version="535.261.03", **changes):
    state = {"driver": version, "driver_library": version, "module": version, "runfile": version}
    return facts(**(state | changes))


# --- nothing to do ------------------------------------------------------------------------------


def test_no_card_or_the_cpu_stack_means_nothing():
    assert plan(facts(cards=()), policy="upgrade")["action"] == "nothing"
    assert plan(facts(), "cpu", policy="upgrade")["action"] == "nothing"


@pytest.mark.parametrize("made", [packaged(), by_runfile()])
@pytest.mark.parametrize("policy", ["keep", "install"])
def test_a_loaded_driver_that_is_new_enough_stays(made, policy):
    chosen = plan(made, policy=policy)
    assert (chosen["action"], chosen["stop"]) == ("nothing", "")
    assert chosen["hold"] is (policy == "install")  # keep touches nothing at all


def test_the_very_version_that_is_needed_is_new_enough():
    needed = TABLE["rows"]["cu126"]["driver"]
    for policy in ("keep", "install"):
        assert plan(by_runfile(needed), "cu126", policy=policy)["action"] == "nothing"


def test_a_driver_of_unknown_origin_is_kept_or_refused_but_never_replaced():
    container = facts(driver="570.10.01", driver_library="570.10.01")
    assert plan(container)["action"] == "nothing"
    assert "came neither by packages" in refused(container, "cu132")
    assert "came neither by packages" in refused(container, "cu132", policy="upgrade")


def test_keep_forbids_what_would_be_a_change_and_names_the_remedy():
    for made in (facts(), packaged(driver=None), packaged(driver_library="535.300.01")):
        assert "driver_policy: install" in refused(made, policy="keep")
    assert "cu132 needs 580" in refused(packaged(), "cu132", policy="keep")


# --- a fresh machine ----------------------------------------------------------------------------


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
    assert "no one driver serves Blackwell and Pascal" in refused(
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
    assert f"driver {version} does not serve" in refused(facts(cards=[card]), "cu126", **mine)


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


# --- a machine that has a driver ----------------------------------------------------------------


def test_too_old_needs_consent_to_upgrade():
    old = by_runfile("470.57.02")
    assert "driver_policy: upgrade, which installs 580.126.20" in refused(old, "cu132")
    assert plan(old, "cu132", policy="upgrade")["version"] == "580.126.20"
    newest = plan(by_runfile("580.126.20"), "cu132", policy="upgrade")
    assert newest["action"] == "nothing"


def test_upgrade_moves_packages_to_what_the_archive_offers():
    newer = dict.fromkeys(DEBIAN12, "535.300.01-1")
    chosen = plan(packaged(offered=newer, kernel_headers=True), policy="upgrade")
    assert (chosen["action"], chosen["version"]) == ("package", "535.300.01")
    assert plan(packaged(), policy="upgrade")["action"] == "nothing"
    gone = packaged(offered={})  # an archive that has no driver any more
    assert plan(gone, policy="upgrade")["action"] == "nothing"


def test_never_one_over_the_other():
    assert "sudo apt purge" in refused(packaged(), source="runfile", policy="upgrade")
    assert "sudo nvidia-uninstall" in refused(by_runfile(), source="package", policy="upgrade")
    assert "nothing newer comes that way" in refused(packaged(), "cu132", policy="upgrade")
    assert "one over the other" in refused(packaged(runfile="580.126.20"))


@pytest.mark.parametrize("side", ["driver", "driver_library"])
def test_a_mismatch_is_loaded_anew(side):
    chosen = plan(packaged(**{side: "535.200.01"}))
    assert chosen["action"] == "load"
    assert "driver/library version mismatch" in chosen["reason"]


def test_a_kernel_without_a_driver_gets_its_module_built():
    new_kernel = {"driver": None, "module": None}
    for made in (packaged(**new_kernel), by_runfile(**new_kernel)):
        assert plan(made)["action"] == "build"


def test_an_interrupted_run_goes_the_same_way_again():
    cut_off = facts(offered=DEBIAN12, runfile="580.126.20", pending=True)
    assert plan(cut_off)["action"] == "runfile"
    half = packaged(pending=True, driver=None)
    assert plan(half)["action"] == "package"


# --- Secure Boot --------------------------------------------------------------------------------


def test_secure_boot_takes_signed_modules_where_the_distribution_has_them():
    made = facts("ubuntu2204", ["2080 Ti"], UBUNTU, secure_boot=True)
    signed = f"linux-modules-nvidia-580-open-{made['kernel']}"
    made["offered"][signed] = "6.8.0-60.63"
    chosen = plan(made)
    names = [text.split("=")[0] for text in chosen["packages"]]
    assert names == [signed, "nvidia-headless-no-dkms-580-open", "nvidia-utils-580"]
    assert chosen["tools"] == ()
    assert plan(made | {"secure_boot": False})["tools"] != ()


def test_a_new_kernel_gets_signed_modules_where_the_old_one_had_them():
    had = {"nvidia-headless-no-dkms-580-open": "580.126.20-0ubuntu1",
           "linux-modules-nvidia-580-open-6.8.0-50-generic": "6.8.0-50.51"}  # fmt: skip
    made = facts("ubuntu2204", ["2080 Ti"], UBUNTU, packages=had)
    assert plan(made)["action"] == "build"
    made["offered"]["linux-modules-nvidia-580-open-6.8.0-60-generic"] = "6.8.0-60.63"
    chosen = plan(made)
    assert chosen["action"] == "package"
    assert chosen["packages"] == ("linux-modules-nvidia-580-open-6.8.0-60-generic=6.8.0-60.63",)


def test_secure_boot_without_signed_packages_goes_by_dkms_where_it_can_sign():
    assert plan(facts(offered=DEBIAN12, secure_boot=True))["action"] == "package"
    bullseye = facts("debian11", secure_boot=True)
    assert "cannot sign" in refused(bullseye)


# --- disks --------------------------------------------------------------------------------------


def test_a_full_disk_is_named_before_anything_is_changed():
    full = facts(offered=DEBIAN12)
    full["free"]["/boot"] = 4e7
    for made in (full, full | {"offered": TOOLS, "kernel_headers": True}):  # packages, runfile
        assert "/boot has 0.0 GB free, and the driver needs 0.1 GB" in refused(made)
    assert plan(packaged(free=full["free"]))["action"] == "nothing"


# --- displays and processes on the card ---------------------------------------------------------

XORG = [{"pid": 812, "command": "Xorg"}]
GDM = {"display_manager": "gdm.service", "display_manager_active": True}


@pytest.mark.parametrize(
    "made", [facts(displays=XORG, **GDM), packaged(driver=None, displays=XORG, **GDM)]
)
def test_a_running_display_is_named_and_stopped_only_with_consent(made):
    said = refused(made)
    assert "Xorg (process 812), gdm.service" in said and "allow_stop_display=true" in said
    assert plan(made, allow_stop_display=True)["stop"] == "gdm.service"


def test_a_display_manager_counts_whatever_it_shows():
    said = refused(facts(**GDM))
    assert "under a running display: gdm.service" in said


def test_a_display_that_nobody_manages_is_not_stopped():
    made = facts(displays=XORG)
    assert "not started by a display manager" in refused(made, allow_stop_display=True)


def test_a_display_does_not_matter_where_nothing_is_done():
    assert plan(packaged(displays=XORG, **GDM))["action"] == "nothing"


def test_a_process_on_the_card_is_never_ended():
    busy = packaged(driver="535.200.01", gpu_processes=[{"pid": 99, "command": "python3"}])
    assert "python3 (process 99) uses the card" in refused(busy, allow_stop_display=True)
