"""The driver's plan where one is installed, and what has to be stopped before a change."""

import pytest

from planning import driver_result, stacks
from tests.unit.ansible.driver_machines import (
    DEBIAN12,
    GDM,
    TOOLS,
    UBUNTU,
    XORG,
    by_runfile,
    facts,
    full,
    moving,
    packaged,
    plan,
    upgrade,
)
from tests.unit.ansible.provision_machines import TABLE


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


def test_a_driver_of_unknown_origin_is_kept_where_it_will_do():
    container = facts(driver="570.10.01", driver_library="570.10.01")
    assert plan(container)["action"] == "nothing"


def test_too_old_is_upgraded_with_consent():
    old = by_runfile("470.57.02")
    assert plan(old, "cu132", policy="upgrade")["version"] == "580.126.20"
    newest = plan(by_runfile("580.126.20"), "cu132", policy="upgrade")
    assert newest["action"] == "nothing"


def test_upgrade_moves_packages_to_what_the_archive_offers():
    newer = dict.fromkeys(DEBIAN12, "535.300.01-1")
    chosen = plan(packaged(offered=newer, kernel_headers=True), policy="upgrade")
    assert (chosen["action"], chosen["version"]) == ("package", "535.300.01")
    assert plan(packaged(), policy="upgrade")["action"] == "nothing"
    gone = packaged(offered={})  # an archive that no longer has a driver
    assert plan(gone, policy="upgrade")["action"] == "nothing"


@pytest.mark.parametrize("side", ["driver", "driver_library"])
def test_a_mismatch_is_loaded_anew(side):
    chosen = plan(packaged(**{side: "535.200.01"}))
    assert chosen["action"] == "load"
    assert "driver/library version mismatch" in chosen["reason"]


def test_a_kernel_without_a_driver_gets_its_module_built():
    new_kernel = {"driver": None, "module": None}
    for made in (packaged(**new_kernel), by_runfile(**new_kernel)):
        assert plan(made)["action"] == "build"


def test_a_runfile_that_dkms_does_not_know_is_run_again_for_a_new_kernel():
    made = plan(by_runfile(driver=None, module=None, dkms=False))
    assert (made["action"], made["version"]) == ("runfile", "580.126.20")
    assert "--dkms" in made["flags"]


def test_a_driver_that_works_gets_its_module_for_the_next_boots_kernel():
    newer = {"waiting_kernel": "6.1.0-50-amd64", "kernel_headers": True}
    headers = {**DEBIAN12, **TOOLS, "linux-headers-6.1.0-50-amd64": "1"}
    chosen = plan(packaged(offered=headers, **newer))
    assert (chosen["action"], chosen["waiting"]) == ("build", "6.1.0-50-amd64")
    assert plan(packaged(offered=headers, waiting_module="535.261.03", **newer))["action"] == (
        "nothing"
    )
    assert "stay with this kernel" in plan(packaged(**newer))["reason"]
    by_hand = plan(by_runfile(dkms=False, **newer))
    assert by_hand["action"] == "nothing" and "make provision again" in by_hand["reason"]


def test_nvidias_own_repository_whose_names_have_no_branch_is_kept_and_held():
    names = {"nvidia-open": "590.48.01-1ubuntu1", "nvidia-driver": "590.48.01-1ubuntu1",
             "libnvidia-compute": "590.48.01-1ubuntu1", "linux-generic": "6.8.0-60.63"}  # fmt: skip
    state = {"driver": "590.48.01", "driver_library": "590.48.01", "module": "590.48.01"}
    made = facts("ubuntu2404", ["3090"], packages=names, offered=names, **state)
    for policy in ("install", "upgrade"):
        chosen = plan(made, "cu132", policy=policy)
        assert (chosen["action"], chosen["version"]) == ("nothing", "590.48.01")
        assert chosen["hold"] is True
    assert sorted(driver_result.driver_hold(made, "590.48.01")["packages"]) == sorted(names)


@pytest.mark.parametrize("library", ["580.173.02", None])
def test_the_version_is_the_librarys_and_not_that_of_a_transitional_package(library):
    """Ubuntu 24.04, where nvidia-driver-550 550.163.01 depends on nvidia-driver-580."""
    names = {"nvidia-driver-550": "550.163.01-0ubuntu0.24.04.2",
             "nvidia-driver-580": "580.173.02-0ubuntu0.24.04.1",
             "libnvidia-compute-580": "580.173.02-0ubuntu0.24.04.1"}  # fmt: skip
    state = {"driver": "580.173.02", "driver_library": library, "module": "580.173.02"}
    leads = {"nvidia-driver-550": "nvidia-driver-580"}
    made = facts("ubuntu2404", ["3090"], packages=names, transitional=leads, **state)
    chosen = plan(made, "cu132")
    assert (chosen["action"], chosen["version"]) == ("nothing", "580.173.02")
    assert set(driver_result.driver_hold(made, chosen["version"])["packages"]) == set(names)


def kepler(packages):
    """A machine whose driver is of one of Debian's older branches."""
    (version,) = {stacks.upstream(found) for found in packages.values()}
    state = dict.fromkeys(("driver", "driver_library", "module"), version)
    return facts(packages=packages, **state) | {"gpus": [{"vendor": "10de", "device": "102d"}]}


def test_debians_older_branches_are_drivers_by_packages():
    names = dict.fromkeys(("nvidia-tesla-470-kernel-dkms", "libnvidia-tesla-470-ml1"),
                          "470.256.02-1~deb12u1")  # fmt: skip
    made = kepler(names)
    chosen = plan(made)
    assert (chosen["action"], chosen["version"], chosen["hold"]) == ("nothing", "470.256.02", True)
    assert driver_result.driver_hold(made, "470.256.02")["packages"] == sorted(names)


@pytest.mark.parametrize(
    ("name", "version"),
    [("legacy-390xx", "390.157-1~deb11u1"), ("tesla", "525.147.05-15~deb12u1")],
)
@pytest.mark.parametrize("part", ["driver", "kernel-dkms"])
def test_debians_legacy_drivers_are_drivers_by_packages_too(name, version, part):
    names = dict.fromkeys((f"nvidia-{name}-{part}", f"libnvidia-{name}-ml1"), version)
    chosen = plan(kepler(names), policy="upgrade", source="runfile")
    assert "was installed from packages" in chosen["reason"]


def test_what_an_older_branch_left_behind_is_not_the_driver():
    names = {"nvidia-dkms-470": "470.256.02-0ubuntu0.22.04.1",
             "nvidia-headless-535": "535.183.01-0ubuntu0.22.04.1",
             "nvidia-kernel-common-535": "535.183.01-0ubuntu0.22.04.1"}  # fmt: skip
    state = {"driver": "535.183.01", "driver_library": "535.183.01", "module": "535.183.01"}
    made = facts("ubuntu2204", packages=names, **state)
    assert plan(made)["version"] == "535.183.01"


@pytest.mark.parametrize("module", ["nvidia-driver-open", "nvidia-dkms-open", "nvidia-dkms"])
def test_nvidias_own_packages_of_a_module_are_a_driver_and_none_comes_over_it(module):
    """590 and on have no branch in their names: a whole driver, or for computing alone."""
    names = {module: "595.71.05-1ubuntu1", "libnvidia-compute": "595.71.05-1ubuntu1"}
    state = {"driver": "595.71.05", "driver_library": "595.71.05", "module": "595.71.05"}
    made = facts("ubuntu2404", ["3090"], packages=names, offered=UBUNTU | TOOLS, **state)
    assert plan(made, "cu132")["hold"] is True
    new_kernel = made | {"driver": None, "module": None, "kernel_headers": True}
    assert plan(new_kernel, "cu132")["action"] == "build"


def test_an_interrupted_run_goes_the_same_way_again():
    cut_off = facts(offered=DEBIAN12, runfile="580.126.20", pending=True)
    assert plan(cut_off)["action"] == "runfile"
    half = packaged(pending=True, driver=None)
    assert plan(half)["action"] == "package"


# --- what stands in the way ---------------------------------------------------------------------


WHY = "libreoffice : Depends: libreoffice-core (= 1:7.4.7) but it is not installed"
STOPPED = {"displays": XORG, "sessions": ["2", "c1"], **GDM}


@pytest.mark.parametrize(
    "there", [full(packaged()), packaged(broken=WHY), packaged(displays=XORG, **GDM)]
)
def test_what_stands_in_the_way_does_not_matter_where_nothing_is_done(there):
    """Where something is, it is refused: refusals.py."""
    assert plan(there)["action"] == "nothing"


def test_packages_that_the_role_left_broken_are_no_hindrance():
    assert plan(facts(offered=DEBIAN12, broken=WHY, pending=True))["action"] == "package"


@pytest.mark.parametrize("made", [facts(**STOPPED), packaged(driver=None, **STOPPED)])
def test_a_running_display_is_stopped_with_consent(made):
    agreed = plan(made, allow_stop_display=True)
    assert (agreed["stop"], agreed["sessions"]) == ("gdm.service", ("2", "c1"))


# --- make upgrade -------------------------------------------------------------------------------

SEEN = {"displays": XORG, **GDM}


def test_an_upgrade_that_has_nothing_to_move_asks_for_nothing():
    chosen = upgrade(moving("6.1.176-1", **SEEN))
    assert (chosen["action"], chosen["kernel"], chosen["stop"]) == ("nothing", False, "")


@pytest.mark.parametrize(
    "made",
    [moving(**SEEN), moving("6.1.176-1", waiting_kernel="6.1.0-60-amd64", **SEEN)],
    ids=["offered", "waiting"],
)
def test_an_upgrade_that_reboots_ends_a_desktop_with_consent(made):
    agreed = upgrade(made, allow_stop_display=True)
    assert (agreed["action"], agreed["kernel"], agreed["stop"]) == ("upgrade", True, "gdm.service")
    nobody = upgrade(made | {"displays": [], "display_manager_active": False})
    assert (nobody["action"], nobody["stop"]) == ("upgrade", "")


def test_an_upgrade_of_the_driver_alone_moves_no_kernel():
    made = moving("6.1.176-1", offered=dict.fromkeys(DEBIAN12, "535.300.01-1"), **SEEN)
    chosen = upgrade(made, allow_stop_display=True)
    assert (chosen["action"], chosen["kernel"]) == ("upgrade", False)
