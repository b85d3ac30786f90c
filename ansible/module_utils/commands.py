"""Read a machine without changing it, for modules that collect facts. Python >= 3.6."""

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
    """Return a command's output; None if it is missing, fails or takes longer."""
    succeeded, text = outcome(*argv, seconds=seconds, errors=False)
    return text.strip() if succeeded else None


def outcome(*argv, seconds=300, errors=True):
    """Run a command; return (true if it succeeded, its output, with its errors if asked for)."""
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
    """Return apt's message about packages without their dependencies; None if it has none.

    After an interrupted installation, on a full disk for example, apt refuses every other one until
    it is finished. The refusal then says nothing about the other packages.
    """
    # NoLocking: an upgrade in the background must not make this fail.
    succeeded, text = outcome("apt-get", "-o", "Debug::NoLocking=true", "check")
    return None if succeeded else apt_reason(text)


def apt_reason(text):
    """Find apt's reason for a refusal; None if it gives none."""
    # The table of missing dependencies says more than the errors after it.
    rows = re.findall(r"^ (\S+ : (?:Pre)?Depends: .+)$", text, re.MULTILINE)
    errors = re.findall(r"^(?:E|Error): (.+)$", text, re.MULTILINE)
    return (rows + errors)[0].strip() if rows or errors else None
