"""Commands and small files on a probed machine."""

import json
import os
import subprocess

SECONDS = 20  # for one command: the control machine waits 30 in all


def output(argv):
    """What a command prints; None where it fails or takes too long."""
    try:
        return subprocess.check_output(
            argv, stderr=subprocess.DEVNULL, timeout=SECONDS, universal_newlines=True
        )
    except (OSError, subprocess.SubprocessError):
        return None


def keep(value, path):
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        temporary.write_text(json.dumps(value))
        temporary.replace(path)
    except OSError:
        pass  # a full disk is reported elsewhere; the listing is only made again
