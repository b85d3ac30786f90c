"""What apt would bring along, and whether it may: pure functions of what it and dpkg print."""

import re

# "Inst NAME (NEW ...)" is a new package; "Inst NAME [OLD] (NEW ...)" one that is there already.
NEW = re.compile(r"^Inst (\S+) \(", re.MULTILINE)

# Who refuses: apt's library, apt-get, dpkg of Ubuntu 18.04 to Debian 13.
LOCKED = re.compile(
    r"Could not get lock|Unable to (acquire|lock) |Failed to lock|is locked by another process"
    r"|was locked by another process"
)


def locked(result):
    """Whether a task failed because another process is installing packages.

    apt has a time to wait (DPkg::Lock::Timeout) from 1.9.11 on, so not on Ubuntu 18.04, and dpkg
    has none: roles try again.
    """
    texts = (result.get(part) for part in ("msg", "stderr", "module_stderr"))
    return any(LOCKED.search(str(text)) for text in texts if text)


def packages_planned(simulated):
    """Names of the packages that an `apt-get --simulate install` would add, sorted.

    What else comes to a machine meanwhile, by its owner or by unattended-upgrades, is not ours.
    """
    return sorted({name.partition(":")[0] for name in NEW.findall(simulated)})


def broken(facts):
    """(cause, remedy) where apt calls installed packages broken; None where it does not.

    What role driver left unfinished it finishes; what somebody else did it leaves alone.
    """
    if facts.broken is None or facts.pending:
        return None
    return (
        f"apt calls its packages broken, and installs nothing beside them ({facts.broken})",
        "there: sudo apt --fix-broken install, or correct what apt names; then run again",
    )
