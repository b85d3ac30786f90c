"""Whether rsync may copy a data set as it would, and why it cannot: pure functions of what programs
print."""

import re

# A few files may go, as when bad images were removed at the source.
FEW = 100
FRACTION = 0.05


def data_refusal(name, changes, there, allowed):
    """Why a data set must not be copied; "" if it may be.

    changes: what `rsync --delete --dry-run` would do, one line each; there: how many files the
    machine has, as text; allowed: whether the user allows deletion (data_delete).
    """
    deletions = [line for line in changes if "*deleting" in line and not line.endswith("/")]
    if allowed or len(deletions) <= FEW or len(deletions) <= FRACTION * int(there):
        return ""
    return (
        f"the control machine's data/{name} lacks {len(deletions)} of the {int(there)} files that "
        f"are there, and a copy would delete them; the first: "
        f"{deletions[0].partition('*deleting')[2].strip()}. Is its disk mounted? If they are to "
        "go: make provision DELETE=1"
    )


def data_lack(measured, rooms, root):
    """Say what a disk lacks for the data sets that differ; "" if nothing.

    measured: what `du` printed on the control machine, for each data set, "" if nothing is to be
    copied; rooms: what the machine printed, the bytes that are there, if any, and those free.
    """
    needed = free = 0
    for here, there in zip(measured, rooms):
        if here:
            *present, free = map(int, re.findall(r"^[0-9]{1,18}$", there, re.MULTILINE)) or [0]
            needed += max(0, int(here.split()[0]) - sum(present))
    if needed <= free:
        return ""
    return (
        f"the data sets need {needed / 1e9:.1f} GB more, and the disk of {root} has "
        f"{free / 1e9:.1f} GB free. Nothing was copied: make room there, or mount a larger disk."
    )


def copy_failure(host, said, trace):
    """Say why rsync could not compare a data set.

    said: its own words; trace: what `bash -x` prints where it starts as for rsync's ssh, with
    `+ file:line: command` for each command.
    """
    if "is your shell clean" not in said:
        return f"{host}: {said}"
    before = ""
    for line in trace:
        if not line.startswith("+"):
            break
        before = line
    else:
        before = ""
    match = re.match(r"\++ (/[^:]*):([0-9]+): (.*)", before)
    where = "a start-up file of that user's shell (.zshenv, .cshrc, config.fish, .bashrc)"
    if match:
        where = f"line {match.group(2)} of {match.group(1)} ({match.group(3)})"
    return (
        f"{host}: {where} prints whenever a program comes by ssh, and rsync takes that for an "
        "answer. Move it below a line `[ -t 1 ] || return`, which ends the file where nobody reads."
    )
