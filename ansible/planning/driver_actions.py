"""Define the five actions on a machine's driver, and the refusal, with their fields.

driver.py decides on an action; role driver carries it out, from the dictionary of `as_dict`.
"""

import dataclasses
from typing import ClassVar

# Role driver announces the reason, then these phrases for the fields that the action has.
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
    """An error with (reason, remedy), for which nothing is done."""


@dataclasses.dataclass(frozen=True)
class ModuleBuild:
    """The requirements for building the driver's kernel module."""

    tools: tuple[str, ...] = ()  # packages
    compiler: str = ""  # if not the machine's own gcc
    key: str = ""  # the certificate that somebody has to enrol in the firmware, for Secure Boot
    waiting: str = ""  # a newer kernel that the next boot starts, and that also gets the module
    reboot_first: bool = False  # into that kernel, if the running one has no headers


@dataclasses.dataclass(frozen=True)
class Action:
    name: ClassVar[str]
    reason: str
    version: str = ""  # of the driver, which is held; "" if there is none


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
    screen: bool = False  # a display runs, so that only a reboot changes what is loaded


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
    url: str = ""  # or a file of the control node
    sha256: str = ""
    flags: tuple[str, ...] = ()
    nouveau: bool = False  # it holds the GPU until the next boot
    without: str = ""  # the display manager without which the boot before the installer ends

    @property
    def reboot_first(self):
        return self.build.reboot_first or self.nouveau or bool(self.without)


def as_dict(action):
    """Return {"action": its name, "summary": the sentence that role driver prints, and its
    fields}."""
    # Flat: roles read the fields of every action in the same way.
    fields = dataclasses.asdict(action)
    if isinstance(action, Installation):
        fields |= {**fields.pop("build"), "reboot_first": action.reboot_first}
    words = {name: " ".join(it) if isinstance(it, tuple) else it for name, it in fields.items()}
    phrases = (text.format(words[name]) for name, text in PHRASES.items() if words.get(name))
    return {"action": action.name, "summary": action.reason + "".join(phrases), **fields}
