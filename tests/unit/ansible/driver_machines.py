"""Recorded machines without a driver, and with one by packages or by the installer."""

from planning import driver
from tests.unit.ansible.provision_machines import TABLE, machine

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
WANTED = {
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
    """A recorded machine without a driver but with kernel headers."""
    made = machine(release, [PCI[card] for card in cards], driver=None, driver_library=None)
    made.update(
        packages={},
        held=[],
        transitional={},
        offered_transitional={},
        offered=TOOLS | {f"linux-headers-{made['kernel']}": "1"} | (offered or {}),
        runfile=None,
        module=None,
        pending=False,
        dkms=True,
        kernel_compiler=None,
        waiting_kernel=None,
        waiting_module=None,
        uninstallable={},
        signing_key=None,
        displays=[],
        gpu_processes=[],
        display_manager=None,
        display_manager_active=False,
        free=dict.fromkeys(driver.SPACE, 9e10),
    )
    made.update(changes)
    return made


def plan(recorded, stack="cu102", **wanted):
    row = dict(TABLE["rows"][stack], name=stack)
    return driver.driver_plan(recorded, WANTED | wanted, row, TABLE)


def refused(recorded, stack="cu102", **wanted):
    made = plan(recorded, stack, **wanted)
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
