"""What apt would bring along: a pure function of what it prints."""

import re

# "Inst NAME (NEW ...)" is a new package; "Inst NAME [OLD] (NEW ...)" one that is there already.
NEW = re.compile(r"^Inst (\S+) \(", re.MULTILINE)


def packages_planned(simulated):
    """Names of the packages that an `apt-get --simulate install` would add, sorted.

    What else comes to a machine meanwhile, by its owner or by unattended-upgrades, is not ours.
    """
    return sorted({name.partition(":")[0] for name in NEW.findall(simulated)})
