"""Define the five actions on a machine's driver, and the refusal, with their fields.

driver.py decides on an action; role driver carries it out, from the dictionary of `as_dict`. The
names of the fields are those that the role's tasks read.
"""

import dataclasses
from typing import ClassVar

# The sentence of an action is its reason, then the phrase of each field that is not empty.
PHRASES = {
    "packages": ": {}",
    "url": ": {}",
    "module": "; the {} module",
    "compiler": ", built by {}",
    "waiting": ", for kernel {} too",
    "reboot_first": "; after a reboot",
    "without": " to a text screen, without {}",
    "key": "; signed with {}, which you must enrol at its screen",
    "screen": "; under the running display, by the next boot",
}


class Refusal(Exception):
    """An obstacle at the machine, as (reason, remedy). driver.plan turns it into Refuse."""


@dataclasses.dataclass(frozen=True)
class ModuleBuild:
    """The requirements for building the driver's kernel module."""

    tools: tuple[str, ...] = ()  # packages
    compiler: str = ""  # the package of a gcc; "" for the machine's own gcc
    key: str = ""  # the certificate that a person has to enrol in the firmware, for Secure Boot
    waiting: str = ""  # the newer kernel of the next boot, if it gets the module too
    reboot_first: bool = False  # true if the running kernel has no headers, but the newer one has


@dataclasses.dataclass(frozen=True)
class Action:
    name: ClassVar[str]
    reason: str
    version: str = ""  # the driver's version, whose packages are then held; "" without a driver


@dataclasses.dataclass(frozen=True)
class Refuse(Action):
    name = "refuse"
    remedy: str = ""


@dataclasses.dataclass(frozen=True)
class Nothing(Action):
    name = "nothing"


@dataclasses.dataclass(frozen=True)
class LoadModule(Action):
    """The driver is installed, but not loaded."""

    name = "load"
    screen: bool = False  # a display runs, so only a reboot loads another module


@dataclasses.dataclass(frozen=True)
class Installation(Action):
    """The base of three actions that write to the disk and may build a module."""

    module: str = ""  # open or proprietary; "" if it does not change
    build: ModuleBuild = ModuleBuild()

    @property
    def reboot_first(self):
        return self.build.reboot_first


@dataclasses.dataclass(frozen=True)
class BuildModule(Installation):
    """DKMS builds the installed driver's module for the running kernel, or the next boot's."""

    name = "build"
    screen: bool = False


@dataclasses.dataclass(frozen=True)
class InstallPackages(Installation):
    name = "package"
    packages: tuple[str, ...] = ()  # apt's name=version
    screen: bool = False


@dataclasses.dataclass(frozen=True)
class RunInstaller(Installation):
    """NVIDIA's installer, which needs a machine without a running display and without nouveau."""

    name = "runfile"
    url: str = ""  # or the path of a file of the control node
    sha256: str = ""
    flags: tuple[str, ...] = ()
    nouveau: bool = False  # nouveau has the GPU until the next boot
    without: str = ""  # the display manager that must not start in the boot before the installer

    @property
    def reboot_first(self):
        return self.build.reboot_first or self.nouveau or bool(self.without)


def as_dict(action):
    """Return {"action": name, "summary": the sentence that role driver prints, and all fields}."""
    # The fields of `build` move up, so that roles read the fields of every action in the same way.
    fields = dataclasses.asdict(action)
    if isinstance(action, Installation):
        fields |= {**fields.pop("build"), "reboot_first": action.reboot_first}
    joined = {name: " ".join(value) for name, value in fields.items() if isinstance(value, tuple)}
    texts = {**fields, **joined}
    phrases = (phrase.format(texts[name]) for name, phrase in PHRASES.items() if texts.get(name))
    return {"action": action.name, "summary": action.reason + "".join(phrases), **fields}
