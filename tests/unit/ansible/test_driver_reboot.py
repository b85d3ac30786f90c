"""On a machine with two systems, a reboot by the role ends in Linux."""

import pytest

from planning.boot import linux_again

# As grub-mkconfig of Debian 12 writes it, without the contents of the entries.
LINUX = """\
set default="2"
menuentry 'Debian GNU/Linux' --class debian --class gnu-linux --class gnu --class os $menuentry_id_option 'gnulinux-simple-1' {
}
submenu 'Advanced options for Debian GNU/Linux' $menuentry_id_option 'gnulinux-advanced-1' {
	menuentry 'Debian GNU/Linux, with Linux 6.1.0-31-amd64' --class debian --class gnu-linux --class gnu --class os $menuentry_id_option 'gnulinux-6' {
	}
}
"""  # noqa: E501
WINDOWS = """\
menuentry 'Windows Boot Manager (on /dev/nvme0n1p1)' --class windows --class os $menuentry_id_option 'osprober-efi-AA' {
}
"""  # noqa: E501
EFI = "BootCurrent: 0003\nTimeout: 1 seconds\nBootOrder: {}\nBoot0000* Windows Boot Manager\n"


@pytest.mark.parametrize(
    ("grub", "efi", "commands"),
    [
        ("", "", []),
        (LINUX, EFI.format("0003,0000"), []),
        (LINUX + WINDOWS, EFI.format("0003,0000"), [["grub-reboot", "0"]]),
        (WINDOWS + LINUX, "", [["grub-reboot", "1"]]),
        # Windows comes first in the firmware; Linux was chosen by hand at power-on.
        (LINUX, EFI.format("0000,0003"), [["efibootmgr", "--quiet", "--bootnext", "0003"]]),
        (WINDOWS, EFI.format("0003,0000"), []),
    ],
)
def test_the_next_boot_is_linux(grub, efi, commands):
    assert linux_again(grub, efi) == commands
