"""Recorded machines without a driver, and with one by packages or by the installer."""

import copy

from planning import driver
from tests.unit.ansible.provision_machines import NO_DRIVER, TABLE, TOOLS, machine

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


ENDED = "570.211.01-0ubuntu1.24.04.1"


def ubuntu_relations(version, modules, kernel, series, branch="580-open", dkms=True):
    """{package: {field: value}} of a driver and its signed modules, related as Ubuntu's are.

    version: the driver's, "580.173.02-0ubuntu0.24.04.1"; modules: that of the driver whose modules
    were signed. source: packages.ubuntu.com and users' apt-cache show and dpkg: nvidia-driver
    depends on nvidia-dkms from below and above (535.288.01); linux-modules-nvidia-515-server-KERNEL
    on its kernel, its objects and nvidia-kernel-common from below and above;
    linux-modules-nvidia-595-generic-hwe-22.04 provides nvidia-dkms-595 (= 595.84-0ubuntu0.22.04.1)
    and nvidia-prebuilt-kernel. ENDED, a branch that has ended, leads to this one, with nothing in
    its packages: 570.211.01-0ubuntu1.24.04.1 to 580 (canonical/core-base, pull request 439).
    """
    number = branch.partition("-")[0]

    def between(name, of=version):
        upstream = of.partition("-")[0]
        return f"{name} (<= {upstream}-1), {name} (>= {upstream})"

    common, library = f"nvidia-kernel-common-{number}", f"libnvidia-compute-{number}"
    headless = f"nvidia-headless-no-dkms-{branch}"
    signed = f"linux-modules-nvidia-{branch}"
    needs = f"{library} (= {version}), nvidia-utils-{number} (= {version}), {between(common)}"
    build = {"Depends": f"dkms, {common}", "Provides": "nvidia-dkms-kernel",
             "Conflicts": "nvidia-dkms-kernel"}  # fmt: skip
    found = {
        f"nvidia-driver-{branch}": {"Depends": f"{needs}, {between(f'nvidia-dkms-{branch}')}"},
        f"nvidia-headless-{branch}": {
            "Depends": f"{headless} (= {version}), {between(f'nvidia-dkms-{branch}')}"
        },
        headless: {"Depends": f"{library} (= {version}), {between(common)}"},
        f"nvidia-utils-{number}": {"Depends": f"{library} (= {version})"},
        **({f"nvidia-dkms-{branch}": build} if dkms else {}),
        common: {},
        library: {},
    }
    rebuilt = {
        f"{signed}-{kernel}": {"Depends": f"linux-image-{kernel}, {between(common, modules)}"},
        f"{signed}-{series}": {
            "Depends": f"{signed}-{kernel}, {between(common, modules)}",
            "Provides": f"nvidia-dkms-{branch} (= {modules}), nvidia-prebuilt-kernel",
        },
        f"linux-image-{kernel}": {},
        f"linux-image-{series}": {"Depends": f"linux-image-{kernel}"},
    }
    whole = {name: {"Version": version, **fields} for name, fields in found.items()}
    whole |= {name: {"Version": "6.14.0-33.33", **fields} for name, fields in rebuilt.items()}
    leading = (f"nvidia-driver-{branch}", library, common, f"{signed}-{series}")
    return whole | {
        name.replace(number, ENDED[:3]): {"Version": ENDED, "Depends": name} for name in leading
    }


PCI = {"1080 Ti": "1b06", "2080 Ti": "1e07", "3090": "2204", "4090": "2684", "5090": "2b85"}
WANTED = driver.driver_wanted({}, [])


def facts(release="debian12", cards=("2080 Ti",), offered=None, **changes):
    """A recorded machine without a driver but with kernel headers."""
    made = machine(release, [PCI[card] for card in cards], driver=None, driver_library=None)
    made = {**copy.deepcopy(NO_DRIVER), "offered": dict(TOOLS), **made}
    made["offered"] |= offered or {}
    made.update(changes)
    return made


def plan(recorded, stack="cu102", **wanted):
    row = dict(TABLE["rows"][stack], name=stack)
    return driver.driver_plan(recorded, WANTED | wanted, row, TABLE)


def upgrade(recorded, stack="cu102", **wanted):
    row = dict(TABLE["rows"][stack], name=stack)
    return driver.upgrade_plan(recorded, WANTED | wanted, row, TABLE)


def refused(recorded, stack="cu102", by=plan, **wanted):
    """The sentence with which one of these two refuses."""
    made = by(recorded, stack, **wanted)
    assert made["action"] == "refuse", made
    return f"{made['reason']}. Remedy: {made['remedy']}"


def names(chosen):
    return [text.partition("=")[0] for text in chosen["packages"]]


def packaged(version="535.261.03", **changes):
    """Debian with its packaged driver installed and loaded."""
    names = {name: f"{version}-1" for name in DEBIAN12 if name != "nvidia-open-kernel-dkms"}
    state = {"driver": version, "driver_library": version, "module": version, "packages": names}
    return facts(**({"offered": DEBIAN12} | state | changes))


def by_runfile(version="535.261.03", **changes):
    state = {"driver": version, "driver_library": version, "module": version, "runfile": version}
    return facts(**(state | changes))


META = "linux-modules-nvidia-580-open-generic-hwe-22.04"
OWN = "linux-modules-nvidia-580-open-6.8.0-60-generic"


def signed(*, coming=(), display_manager=None, **changes):
    """A machine with Secure Boot whose archive has signed modules, and what apt would bring."""
    made = facts("ubuntu2204", ["2080 Ti"], UBUNTU, display_manager=display_manager,
                 secure_boot=True, kernel_series="generic-hwe-22.04", **changes)  # fmt: skip
    modules = [META, OWN]
    made["offered"] |= dict.fromkeys(modules, "6.8.0-60.63")
    for driver_ in ("driver", "headless-no-dkms"):
        made["prebuilt"][" ".join([*modules, f"nvidia-{driver_}-580-open"])] = [*modules, *coming]
    return made


# Displays and processes on the card, and a machine for whose kernel the archive may have a newer.
XORG = [{"pid": 812, "command": "Xorg"}]
SEATED = {"seated": ["anna"]}
GDM = {"display_manager": "gdm.service", "display_manager_active": True}
BUSY = [{"pid": 99, "command": "python3"}]
KERNELS = {"linux-image-amd64": "6.1.176-1", "linux-headers-amd64": "6.1.176-1"}


def moving(newer="6.1.180-1", **changes):
    made = packaged(kernel_headers=True, **changes)
    made["packages"] = made["packages"] | KERNELS
    made["offered"] = made["offered"] | dict.fromkeys(KERNELS, newer)
    return made


def full(made):
    """The same with too little room for an initial RAM disk."""
    return {**made, "free": {**made["free"], "/boot": 4e7}}
