"""Find the kernel of the next boot. Reads only. Python >= 3.6."""

import glob
import re

BOOT = "/boot"


def waiting_kernel(running):
    """Find the newest kernel in /boot, which the next boot starts; None: no newer one."""
    releases = [path.split("vmlinuz-", 1)[1] for path in glob.glob(BOOT + "/vmlinuz-*")]
    releases = [release for release in releases if not release.endswith((".old", ".dpkg-tmp"))]
    newest = max(releases, key=numbers, default=running)
    return newest if numbers(newest) > numbers(running) else None


def numbers(release):
    return [int(part) for part in re.findall(r"\d+", release)]
