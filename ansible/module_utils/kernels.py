"""Find the kernel of the next boot. Reads only. Python >= 3.6."""

import glob
import re

BOOT = "/boot"


def waiting_kernel(running):
    """Find the newest kernel in /boot, which the next boot starts; None if it is running."""
    # "/boot/vmlinuz-6.8.0-64-generic"; dpkg and installkernel leave copies with a suffix.
    releases = [path.split("vmlinuz-", 1)[1] for path in glob.glob(BOOT + "/vmlinuz-*")]
    releases = [release for release in releases if not release.endswith((".old", ".dpkg-tmp"))]
    newest = max(releases, key=numbers, default=running)
    return newest if numbers(newest) > numbers(running) else None


def numbers(release):
    """Return a key that sorts releases: as text, 6.1.0-9 would be newer than 6.1.0-10."""
    return [int(number) for number in re.findall(r"\d+", release)]
