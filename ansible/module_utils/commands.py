"""Read files and outputs of commands on a machine, for modules that collect facts. Python >= 3.6.

Nothing here changes the machine.
"""

import os
import re
import subprocess


def read(path):
    """Read a small file's text without surrounding whitespace; None if it cannot be read."""
    try:
        with open(path, errors="replace") as file:
            return file.read().strip()
    except OSError:
        return None


def output(*argv, seconds=10):
    """Return a command's output; None if the command is missing, fails or takes longer."""
    succeeded, text = outcome(*argv, seconds=seconds, errors=False)
    return text.strip() if succeeded else None


def outcome(*argv, seconds=300, errors=True):
    """Run a command. Return (true if it succeeded, its output); errors: true to include stderr."""
    try:
        process = subprocess.run(
            argv,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if errors else subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
            timeout=seconds,
            env=dict(os.environ, LC_ALL="C"),  # callers search for English words
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return False, str(error)
    return process.returncode == 0, process.stdout.decode(errors="replace")


def apt_broken():
    """Return apt's message about packages without their dependencies; None if there are none.

    apt refuses every installation until such packages are repaired, for example after a full disk
    interrupted an installation. So these refusals say nothing about the refused packages.
    """
    # NoLocking: the check must not fail while an upgrade runs in the background.
    succeeded, text = outcome("apt-get", "-o", "Debug::NoLocking=true", "check")
    return None if succeeded else apt_reason(text)


def apt_reason(text):
    """Find apt's reason for a refusal; None if it gives none."""
    # " nvidia-driver-570 : Depends: libc6 (>= 2.38) but 2.35 is to be installed" says more than the
    # errors after the table: "E: Unable to correct problems, you have held broken packages."
    rows = re.findall(r"^ (\S+ : (?:Pre)?Depends: .+)$", text, re.MULTILINE)
    errors = re.findall(r"^(?:E|Error): (.+)$", text, re.MULTILINE)
    return (rows + errors)[0].strip() if rows or errors else None
