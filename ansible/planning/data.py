"""Whether a copy of a data set may be made as rsync would make it: a pure function of its words."""

# A handful of files may go, as when a few bad images were taken out at the source.
FEW = 100
FRACTION = 0.05


def data_refusal(name, changes, there, allowed):
    """Say why a data set is not copied, or "" where nothing speaks against it.

    changes: what `rsync --delete --dry-run` would do, a line each; there: how many files the
    machine has, as text; allowed: the user's leave to delete (data_delete).
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
