"""What is done about a machine's driver, by a table of plans: driver_plans.txt, reviewed as a file.

What is refused: tests/messages/ansible.py.
"""

from functools import partial

from planning import driver, driver_result, stacks
from tests.unit.ansible.driver_machines import (
    DEBIAN12,
    GDM,
    OWN,
    SEATED,
    UBUNTU,
    WANTED,
    XORG,
    by_runfile,
    facts,
    full,
    moving,
    packaged,
    plan,
    signed,
    upgrade,
)
from tests.unit.ansible.provision_machines import TABLE, TOOLS, reviewed

DESKTOP = {"display_manager": "gdm.service"}
MINE = {"runfile": "/srv/NVIDIA-Linux-x86_64-440.100.run", "runfile_sha256": "0" * 64}
AT_HAND = [TABLE["drivers"][0]["url"].rpartition("/")[2]]
# Debian 13 has 535 beside 550, of which one knows an end.
DEBIAN13 = dict.fromkeys(DEBIAN12, "550.163.01-2") | {
    "nvidia-tesla-535-kernel-dkms": "535.309.01-1~deb13u1",
    "nvidia-tesla-535-smi": "535.309.01-1~deb13u1",
    "libnvidia-tesla-535-cuda1": "535.309.01-1~deb13u1",
}
NO_GCC = {name: version for name, version in TOOLS.items() if name != "gcc"}
# Ubuntu 20.04 has 535 for desktops, and 570 for servers alone.
FOCAL = {name: at for name, at in UBUNTU.items() if "580" not in name and "610" not in name}
FOCAL |= {
    name.replace("535", "570"): "570.86.15-0ubuntu0.20.04.5"
    for name in FOCAL
    if "535-server" in name
}
NO_HEADLESS = {name: at for name, at in UBUNTU.items() if "headless" not in name}
# Ubuntu's nvidia-driver-575 brings 580 by now, and so does nvidia-driver-535 535.309.01.
MOVED = {"nvidia-driver-575": "580.126.09-0ubuntu0.22.04.1",
         "nvidia-driver-535": "535.309.01-0ubuntu0.22.04.1"}  # fmt: skip
LEADS = dict.fromkeys(MOVED, "nvidia-driver-580")
# What counts is the version that it brings, whatever its name says.
BEYOND = {name: at for name, at in UBUNTU.items() if "-535" in name}
BEYOND |= {f"nvidia-{part}-570": "595.71.05-0ubuntu1" for part in ("driver", "headless", "utils")}
# Debian 12's nvidia-tesla-470-*; its own branch, 535, knows no Kepler.
TESLA = dict.fromkeys(
    ("nvidia-tesla-470-kernel-dkms", "nvidia-tesla-470-smi", "nvidia-tesla-470-driver",
     "libnvidia-tesla-470-cuda1"),
    "470.256.02-1~deb12u1",
)  # fmt: skip
K80 = {"gpus": [{"vendor": "10de", "device": "102d"}] * 2}
# NVIDIA's repository for Debian has 620 alone, which knows no Pascal; Debian's own module is older.
BESIDE_NVIDIAS = DEBIAN13 | dict.fromkeys(("nvidia-smi", "libcuda1"), "620.61.03-1")
BESIDE_NVIDIAS = {name: at for name, at in BESIDE_NVIDIAS.items() if "535" not in name}
# Ubuntu's 620, of which one name only leads to the other; in a table that knows such drivers.
OPEN_ALONE = {
    f"nvidia-{part}-620{kind}": "620.61.03-0ubuntu0.26.04.1"
    for part, kind in (("driver", ""), ("driver", "-open"), ("headless", "-open"), ("utils", ""))
}
LATER = {**TABLE, "drivers": [{**TABLE["drivers"][0], "branch": 620}, *TABLE["drivers"]]}
HWE = {"offered": UBUNTU | {"gcc-12": "12.3.0"}, "kernel_compiler": "12"}
NEWER = {"waiting_kernel": "6.1.0-50-amd64"}
NEW_HEADERS = {**DEBIAN12, **TOOLS, "linux-headers-6.1.0-50-amd64": "1"}
BARE = {"offered": NEW_HEADERS, "kernel": "6.1.0-10-amd64"}
SIGNED_535 = "linux-modules-nvidia-535-generic-hwe-22.04"
FOR_NEW = {"linux-modules-nvidia-580-open-6.8.0-60-generic": "6.8.0-60.63"}
HAD = {"nvidia-headless-no-dkms-580-open": "580.126.20-0ubuntu1",
       "linux-modules-nvidia-580-open-6.8.0-50-generic": "6.8.0-50.51"}  # fmt: skip
# Of a branch that has ended only a name is left, by which no module is chosen.
ENDED = {"transitional": {SIGNED_535: "linux-modules-nvidia-580-generic-hwe-22.04"},
         "packages": HAD | {SIGNED_535: "6.8.0-50.51"}}  # fmt: skip


def signed_older():
    made = signed(coming=["nvidia-dkms-580-open"])
    made["offered"][SIGNED_535] = "6.8.0-60.63"
    own = SIGNED_535.replace("generic-hwe-22.04", made["kernel"])
    made["prebuilt"][f"{SIGNED_535} nvidia-headless-no-dkms-535"] = [SIGNED_535, own]
    return made


def new_kernel(**changes):
    """Of Ubuntu, whose old kernel had signed modules."""
    return facts("ubuntu2204", **{"packages": HAD, "offered": UBUNTU, **changes})


FRESH = {
    "Debian": plan(facts(offered=DEBIAN12)),
    "Ubuntu 20.04": plan(facts("ubuntu2004", offered=FOCAL)),
    "Ubuntu 20.04, desktop": plan(facts("ubuntu2004", offered=FOCAL, **DESKTOP)),
    "own runfile before packages": plan(facts(offered=DEBIAN12), **MINE),
    "offline": plan(facts(), offline=True, at_hand=AT_HAND),
    "named version, other packages": plan(
        facts(offered=DEBIAN12), version=TABLE["drivers"][0]["version"]
    ),
    "kernel too new for the packages": plan(
        facts("ubuntu2204", offered=UBUNTU, kernel="7.0.0-28-generic", kernel_headers=True), "cu132"
    ),
    "kernel too new for the packages, prebuilt": plan(
        signed(coming=[OWN.replace("6.8.0-60", "7.3.0-10")]) | {"kernel": "7.3.0-10-generic"}
    ),
    "prebuilt for the kernel that comes": plan(
        signed(coming=["linux-image-6.8.0-60-generic"]) | {"kernel": "6.8.0-40-generic"}
    ),
    "prebuilt for an older kernel than the running one, mainline": plan(
        signed(coming=["linux-image-6.8.0-60-generic"], kernel_headers=True)
        | {"kernel": "6.15.4-061504-generic", "secure_boot": False}
    ),
    "prebuilt for an older kernel than the waiting one, xanmod": plan(
        signed(coming=["linux-image-6.8.0-60-generic"], kernel_headers=True,
               waiting_kernel="6.15.4-x64v3-xanmod1")
        | {"kernel": "6.8.0-40-generic", "secure_boot": False}
    ),
    "kernel of backports, an ended branch": plan(
        facts("debian13", ["3090"], DEBIAN13, kernel="7.1.3+deb13-amd64", kernel_headers=True),
        "cu126",
    ),
    "named version, packages": plan(facts(offered=UBUNTU), version="580.126.20"),
    "nouveau": plan(facts(nouveau=True)),
    "gcc in place": plan(
        facts(kernel_headers=True, packages={"gcc": "4:12.2"}) | {"offered": DEBIAN12 | NO_GCC}
    ),
    "branch not installable": plan(
        facts("ubuntu2204", offered=UBUNTU,
              uninstallable={name: "Depends: something" for name in UBUNTU if "-580" in name})
    ),
    "no headless": plan(facts("ubuntu2204", offered=NO_HEADLESS)),
    "Pascal beside NVIDIA's repository": plan(
        facts("debian13", ["1080 Ti"], BESIDE_NVIDIAS, kernel_headers=True), "cu126"
    ),
    "open modules alone, desktop": driver.driver_plan(
        facts("ubuntu2404", offered=OPEN_ALONE, **DESKTOP),
        WANTED,
        dict(TABLE["rows"]["cu132"], name="cu132"),
        LATER,
    ),
    "transitional offer": plan(
        facts("ubuntu2204", ["1080 Ti"], UBUNTU | MOVED, offered_transitional=LEADS, **DESKTOP)
    ),
    "name of an older branch": plan(facts("ubuntu2204", offered=BEYOND)),
    "Kepler, desktop": plan(facts(offered=DEBIAN12 | TESLA, **DESKTOP) | K80),
    "kernel of a newer gcc": plan(facts("ubuntu2204", **HWE, gcc="11.4.0")),
    "kernel of a newer gcc, by packages": plan(
        facts("ubuntu2204", **HWE) | {"gcc": None, "offered": HWE["offered"] | TOOLS | {
            "gcc": "4:11.2.0-1ubuntu1", "linux-headers-6.8.0-60-generic": "1"}}
    ),
    "kernel of the same gcc": plan(facts("ubuntu2204", **HWE, gcc="12.3.0")),
    "headers for the waiting kernel alone, runfile": plan(
        facts(**BARE, **NEWER), source="runfile"
    ),
    "interrupted runfile": plan(facts(offered=DEBIAN12, runfile="580.126.20", pending=True)),
    "display, packages": plan(facts(offered=DEBIAN12, displays=XORG, **SEATED, **GDM)),
}  # fmt: skip
SECURE = {
    "headless": plan(signed()),
    "desktop": plan(signed(**DESKTOP)),
    "off, would build": plan(signed(coming=["dkms"]) | {"secure_boot": False}),
    "older branch is signed": plan(signed_older()),
    "new kernel": plan(new_kernel()),
    "new kernel, signed, branch ended": plan(
        new_kernel(offered=UBUNTU | FOR_NEW | {SIGNED_535.replace("generic-hwe-22.04",
                   "6.8.0-60-generic"): "6.8.0-60.63"}, **ENDED)
    ),
    "runfile": plan(facts("debian12", ["3090"], secure_boot=True), "cu132"),
}  # fmt: skip

NEW_KERNEL = {"driver": None, "module": None}
VERSION_590 = dict.fromkeys(("driver", "driver_library", "module"), "590.48.01")
# NVIDIA's own repository, whose names have no branch.
NVIDIAS = dict.fromkeys(("nvidia-open", "nvidia-driver", "libnvidia-compute"), "590.48.01-1ubuntu1")
OF_NVIDIA = facts("ubuntu2404", ["3090"], packages=NVIDIAS | {"linux-generic": "6.8.0-60.63"},
                  offered=NVIDIAS, **VERSION_590)  # fmt: skip
# Ubuntu 24.04, where nvidia-driver-550 550.163.01 depends on nvidia-driver-580.
TRANSITIONAL = {"nvidia-driver-550": "550.163.01-0ubuntu0.24.04.2",
                "nvidia-driver-580": "580.173.02-0ubuntu0.24.04.1",
                "libnvidia-compute-580": "580.173.02-0ubuntu0.24.04.1"}  # fmt: skip
LEFT = {"nvidia-dkms-470": "470.256.02-0ubuntu0.22.04.1",
        "nvidia-headless-535": "535.183.01-0ubuntu0.22.04.1",
        "nvidia-kernel-common-535": "535.183.01-0ubuntu0.22.04.1"}  # fmt: skip


def led(library):
    """A machine with a transitional package beside the driver's own."""
    state = {"driver": "580.173.02", "module": "580.173.02", "driver_library": library}
    leads = {"nvidia-driver-550": "nvidia-driver-580"}
    return facts("ubuntu2404", ["3090"], packages=TRANSITIONAL, transitional=leads, **state)


def by(names, version, release="debian12", **changes):
    """A machine whose driver is of these packages."""
    state = dict.fromkeys(("driver", "driver_library", "module"), stacks.upstream_version(version))
    return facts(release, packages=dict.fromkeys(names, version), **{**state, **changes})


OLDER = ("nvidia-tesla-470-kernel-dkms", "libnvidia-tesla-470-ml1")
PRESENT = {
    "packages, keep": plan(packaged(), policy="keep"),
    "the very version": plan(by_runfile(TABLE["rows"]["cu126"]["driver"]), "cu126"),
    "the very version, keep": plan(
        by_runfile(TABLE["rows"]["cu126"]["driver"]), "cu126", policy="keep"
    ),
    "other library": plan(packaged(driver_library="535.200.01")),
    "new kernel, runfile": plan(by_runfile(**NEW_KERNEL)),
    "new kernel, runfile without DKMS": plan(by_runfile(**NEW_KERNEL, dkms=False)),
    "kernel waits": plan(packaged(offered=NEW_HEADERS, kernel_headers=True, **NEWER)),
    "kernel waits, module there": plan(
        packaged(offered=NEW_HEADERS, waiting_module="535.261.03", kernel_headers=True, **NEWER)
    ),
    "kernel waits, runfile without DKMS": plan(
        by_runfile(dkms=False, kernel_headers=True, **NEWER)
    ),
    "NVIDIA's repository": plan(OF_NVIDIA, "cu132"),
    "transitional": plan(led("580.173.02"), "cu132"),
    "transitional, no library": plan(led(None), "cu132"),
    "older branch left behind": plan(
        facts("ubuntu2204", packages=LEFT,
              **dict.fromkeys(("driver", "driver_library", "module"), "535.183.01"))
    ),
    "full disk, nothing to do": plan(full(packaged())),
    "display, nothing to do": plan(packaged(displays=XORG, **GDM)),
}  # fmt: skip
# None comes over Debian's legacy drivers, nor over NVIDIA's packages of a module, which have no
# branch in their names since 590: a whole driver, or for computing alone.
for legacy, version in (("legacy-390xx", "390.157-1"), ("tesla", "525.147.05-15")):
    own = by((f"nvidia-{legacy}-kernel-dkms", f"libnvidia-{legacy}-ml1"), version) | K80
    PRESENT[f"Debian's {legacy}"] = plan(own, policy="upgrade", source="runfile")
for module in ("nvidia-driver-open", "nvidia-dkms"):
    own = by((module, "libnvidia-compute"), "595.71.05-1ubuntu1", "ubuntu2404", offered=UBUNTU)
    PRESENT[module] = plan(own, "cu132")

SEEN = {"displays": XORG, **SEATED, **GDM}
agreed = partial(upgrade, interrupt=True)
UPGRADE = {
    "nothing newer": upgrade(moving("6.1.176-1", **SEEN)),
    "kernel waits": agreed(moving("6.1.176-1", waiting_kernel="6.1.0-60-amd64", **SEEN)),
    "driver alone": agreed(
        moving("6.1.176-1", offered=dict.fromkeys(DEBIAN12, "535.300.01-1"), **SEEN)
    ),
}


def shown(made):
    """The parts of a plan that say something, a line each."""
    said = {name: value for name, value in made.items() if value not in ("", (), False)}
    said.pop("summary", None)  # role driver's sentence of the other parts
    return "\n".join(
        f"{name}: {' '.join(value) if isinstance(value, tuple) else value}"
        for name, value in said.items()
    )


def test_plans_are_those_that_were_reviewed():
    rooms = {"fresh": FRESH, "secure boot": SECURE, "present": PRESENT, "make upgrade": UPGRADE}
    made = {
        f"{room}: {case}": shown(of) for room, plans in rooms.items() for case, of in plans.items()
    }
    reviewed("driver_plans.txt", made)


def test_what_is_held_is_the_driver_that_is_kept():
    for made, version, held in (
        (OF_NVIDIA, "590.48.01", {*NVIDIAS, "linux-generic"}),
        (led("580.173.02"), "580.173.02", set(TRANSITIONAL)),
        (by(OLDER, "470.256.02-1~deb12u1"), "470.256.02", set(OLDER)),
    ):
        names = driver_result.driver_hold(made, version, WANTED, {"name": "cu126"})["packages"]
        assert set(names) == held
