"""Read the output of apt and dpkg: what they would install, and why they fail. Pure functions."""

import re

# "Inst NAME (NEW ...)" is a new package; "Inst NAME [OLD] (NEW ...)" is an installed one.
NEW = re.compile(r"^Inst (\S+) \(", re.MULTILINE)

# The messages of apt's library, apt-get and dpkg from Ubuntu 18.04 to Debian 13.
LOCKED = re.compile(
    r"Could not get lock|Unable to (acquire|lock) |Failed to lock|is locked by another process"
    r"|was locked by another process"
)


def locked(result):
    """Return whether a task failed because another process is installing packages.

    Roles then try again. apt can wait (DPkg::Lock::Timeout) only from 1.9.11 on, so not on Ubuntu
    18.04, and dpkg cannot.
    """
    texts = (result.get(field) for field in ("msg", "stderr", "module_stderr"))
    return any(LOCKED.search(str(text)) for text in texts if text)


def packages_planned(simulated):
    """Return the sorted names of the packages that an `apt-get --simulate install` would add.

    Packages that the owner or unattended-upgrades install meanwhile do not count.
    """
    return sorted({name.partition(":")[0] for name in NEW.findall(simulated)})


def broken(facts):
    """Return (cause, remedy) if apt calls installed packages broken; None otherwise."""
    # Role driver finishes its own interrupted installations.
    if facts.broken is None or facts.pending:
        return None
    return (
        "apt reports broken packages, and installs nothing until they are repaired "
        f"({facts.broken})",
        "type on that machine: sudo apt --fix-broken install, or repair what apt lists; then "
        "run the command again",
    )
