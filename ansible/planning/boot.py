"""How to have a boot loader start Linux again on a machine with two systems."""

import re

ENTRY = re.compile(r"(menuentry|submenu) ")


def linux_again(grub_cfg, efi):
    """The commands to run before a reboot, each a list of words; [] if Linux starts by default.

    grub_cfg: text of /boot/grub/grub.cfg, "" where there is none. efi: what `efibootmgr` prints, ""
    where there is none. Both commands count for the next boot alone.
    """
    commands = []
    current = re.search(r"^BootCurrent: ([0-9A-F]{4})$", efi, re.MULTILINE)
    order = re.search(r"^BootOrder: ([0-9A-F]{4})", efi, re.MULTILINE)
    if current and order and current[1] != order[1]:
        commands.append(["efibootmgr", "--quiet", "--bootnext", current[1]])
    # Entries of a submenu are indented; an entry's number counts those of the first level.
    entries = [line for line in grub_cfg.splitlines() if ENTRY.match(line)]
    linux = [place for place, line in enumerate(entries) if "--class gnu-linux" in line]
    if any("osprober" in line or "--class windows" in line for line in entries) and linux:
        commands.append(["grub-reboot", str(linux[0])])
    return commands
