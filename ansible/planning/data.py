"""Check that rsync may copy a data set, and explain its failures: pure functions of texts."""

import re

# So many files may be deleted, as when bad images were removed at the source.
MAX_DELETIONS = 100
MAX_DELETED_FRACTION = 0.05


def data_refusal(name, changes, file_count, allowed):
    """Explain why a data set must not be copied; "" if it may be.

    changes: the lines of `rsync --delete --dry-run`; file_count: number of the machine's files, as
    text; allowed: true if the user allows deletion (data_delete).
    """
    deletions = [line for line in changes if "*deleting" in line and not line.endswith("/")]
    if allowed or len(deletions) <= MAX_DELETIONS:
        return ""
    total = int(file_count)
    if len(deletions) <= MAX_DELETED_FRACTION * total:
        return ""
    return (
        f"the control machine's data/{name} lacks {len(deletions)} of the {total} files that "
        f"are there, and a copy would delete them; the first: "
        f"{deletions[0].partition('*deleting')[2].strip()}. Is its disk mounted? If they are to "
        "go: make provision DELETE=1"
    )


def data_lack(measured, rooms, root):
    """Tell how much space a disk lacks for the data sets that differ; "" if none.

    measured: output of `du` on the control machine for each data set, "" if nothing is to be
    copied; rooms: outputs of the machine, with the bytes it has, if any, and the free bytes.
    """
    missing_bytes = free = 0
    for du, room in zip(measured, rooms):
        if du:
            *present, free = map(int, re.findall(r"^[0-9]{1,18}$", room, re.MULTILINE)) or [0]
            missing_bytes += max(0, int(du.split()[0]) - sum(present))
    if missing_bytes <= free:
        return ""
    return (
        f"the data sets need {missing_bytes / 1e9:.1f} GB more, and the disk of {root} has "
        f"{free / 1e9:.1f} GB free. Nothing was copied: make room there, or mount a larger disk."
    )


def copy_failure(host, error, trace):
    """Explain why rsync could not compare a data set.

    error: rsync's message; trace: lines of `bash -x` that starts as for rsync's ssh, with
    `+ file:line: command` for each command.
    """
    if "is your shell clean" not in error:
        return f"{host}: {error}"
    # The last command before the first line of output is the one that prints.
    command = ""
    for line in trace:
        if not line.startswith("+"):
            break
        command = line
    else:
        command = ""
    match = re.match(r"\++ (/[^:]*):([0-9]+): (.*)", command)
    location = "a start-up file of that user's shell (.zshenv, .cshrc, config.fish, .bashrc)"
    if match:
        location = f"line {match.group(2)} of {match.group(1)} ({match.group(3)})"
    return (
        f"{host}: {location} prints whenever a program comes by ssh, and rsync takes that for an "
        "answer. Move it below a line `[ -t 1 ] || return`, which ends the file where nobody reads."
    )
