"""Check that rsync may copy a data set, and explain its failures, from what programs printed.

Role data calls these functions as filters, before and after it copies the control node's data sets
to a machine. They return a sentence for the user, or "".
"""

import contextlib
import os
import re
from pathlib import Path

from boundary.answers import Listing
from contract.text import size

from . import reading

# A copy may delete a few files on the machine without the user's consent, such as bad images that
# were removed at the source. More deletions mean, for example, that the source is not mounted.
MAX_DELETIONS = 100
MAX_DELETED_FRACTION = 0.05
NEW_FILE = re.compile(r"[<>]f\+{7,} (.*)")  # ">f+++++++++ train/cat/1.jpg" of --itemize-changes
ESCAPED_BYTE = re.compile(rb"\\#([0-3][0-7]{2})")
BLOCK_BYTES = 512  # of stat's st_blocks


def data_refusal(name, changes, file_count, allowed):
    """Explain why a data set must not be copied; "" if it may be.

    changes: the lines of `rsync --delete --dry-run`; file_count: number of the machine's files, as
    text; allowed: true if the user allows deletion (data_delete).
    """
    # "*deleting   train/cat/1.jpg"; a folder ends with / and does not count.
    deletions = [line for line in changes if "*deleting" in line and not line.endswith("/")]
    if allowed or len(deletions) <= MAX_DELETIONS:
        return ""
    total = int(file_count)
    if len(deletions) <= MAX_DELETED_FRACTION * total:
        return ""
    return (
        f"the control node's data/{name} lacks {len(deletions)} of the machine's {total} "
        f"files, so a copy would delete those {len(deletions)} on the machine; the first is "
        f"{deletions[0].partition('*deleting')[2].strip()}. Is the control node's disk "
        "mounted? To delete them, type make provision DELETE=1"
    )


def data_lack(names, changes, room, source, root):
    """Explain that a disk has too little space for the new files; "" if it has enough.

    names: the data sets; changes: for each, the lines of `rsync --dry-run`; room: the output of
    `df`, with the free bytes at the end; source, root: the folders of data sets here and on the
    machine.
    """
    # Replaced files do not count, since nobody knows how many bytes they free.
    new_bytes = 0
    for name, lines in zip(names, changes):
        for line in lines:
            if match := NEW_FILE.fullmatch(line):
                # rsync escapes bytes that a terminal cannot show: `\#012` is a line feed.
                escaped = os.fsencode(match[1])
                path = ESCAPED_BYTE.sub(lambda code: bytes([int(code[1], 8)]), escaped)
                file = Path(source, name, os.fsdecode(path))
                # The file may be gone since the dry run. Holes of a sparse file need no space.
                with contextlib.suppress(OSError):
                    new_bytes += file.stat().st_blocks * BLOCK_BYTES
    # If the machine does not report its free bytes, the copy itself shows whether it fits.
    match = re.search(r"\b[0-9]{1,18}\s*\Z", room)
    free = int(match[0]) if match else new_bytes
    if new_bytes <= free:
        return ""
    return (
        f"the new files of the data sets need {size(new_bytes)}, but the disk of {root} has "
        f"{size(free)} free. Nothing was copied: free disk space on that machine, or mount a "
        "larger disk."
    )


def data_loss(name, copy, source):
    """Describe the files that a machine's copy of a data set lacks; "" if it lacks none.

    copy, source: the listings that contract/layout.py printed on the machine and on the control
    node.
    """
    label = f"the listing of {name}"
    copy_listings, source_listings = (
        reading.parsed(text, dict[str, Listing] | str, label) for text in (copy, source)
    )
    if isinstance(copy_listings, str):  # layout.py printed an error
        return f"the copy of {name} cannot be listed: {copy_listings}"
    for split, listing in source_listings.items():
        copied = copy_listings.get(split)
        if not copied or copied.images < listing.images or copied.bytes < listing.bytes:
            copied_amount, amount = (
                f"{row.images} files of {row.bytes:,} bytes" if row else "none"
                for row in (copied, listing)
            )
            folder = name if split == "files" else f"{name}/{split}"
            return (
                f"{folder} has {copied_amount}, and its source {amount}. Does a program delete "
                "them? Run again: make provision TAGS=data"
            )
    return ""


def copy_failure(host, error, trace):
    """Explain why rsync could not compare a data set.

    error: rsync's message; trace: the output of `bash -x` that starts as for rsync's ssh.
    """
    if "is your shell clean" not in error:
        return f"{host}: {error}"
    # "+ /home/anna/.bashrc:12: echo hello" is a command, and its output comes after it. So the last
    # command before the first line of output prints that line.
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
        f"{host}: {location} prints text when a program logs in with ssh, which confuses "
        "rsync. Move the printing line below a line `[ -t 1 ] || return`, which skips the "
        "rest of the file if there is no terminal."
    )
