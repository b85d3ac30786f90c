"""What apt says of a machine's packages. Python >= 3.6."""

import re

from ansible.module_utils.commands import outcome


def broken():
    """What apt says of installed packages that lack what they depend on; None if they are whole.

    An installation that broke off, on a full disk for example, leaves it so that apt refuses every
    other until it is finished: no word against any package that it is asked for.
    """
    succeeded, text = outcome("apt-get", "-o", "Debug::NoLocking=true", "check")
    return None if succeeded else reason(text)


def reason(text):
    """apt's own table of what is missing, whose other lines only say that something is; None where
    it gives no reason."""
    rows = re.findall(r"^ (\S+ : (?:Pre)?Depends: .+)$", text, re.MULTILINE)
    errors = re.findall(r"^(?:E|Error): (.+)$", text, re.MULTILINE)
    return (rows + errors)[0].strip() if rows or errors else None
