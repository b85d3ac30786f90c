"""Reading a machine without changing it, for the modules that collect facts. Python >= 3.6."""

import os
import subprocess


def read(path):
    """A small file's text without surrounding blanks; None where it cannot be read."""
    try:
        with open(path, errors="replace") as file:
            return file.read().strip()
    except OSError:
        return None


def output(*argv, seconds=10):
    """What a command prints; None where it is missing, fails or takes longer."""
    try:
        done = subprocess.run(
            argv,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
            timeout=seconds,
            env=dict(os.environ, LC_ALL="C"),
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode(errors="replace").strip() if done.returncode == 0 else None
