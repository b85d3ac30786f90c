"""Whether rsync may copy a data set as it would: a pure function of rsync's output."""

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
