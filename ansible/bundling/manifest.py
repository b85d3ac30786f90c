"""Write and check the list of a bundle folder's files, in the format of `sha256sum --check`.

It is written last: a folder with a manifest was complete. Its first line is the purpose of the
folder, for example "lock <sha>".
"""

import hashlib

NAME = "MANIFEST.sha256"


def sha256(path):
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def write(folder, purpose, digests):
    """Write the manifest. `digests`: {file name: SHA-256}; `purpose`: a line."""
    lines = [f"# {purpose}", *(f"{digest}  {name}" for name, digest in sorted(digests.items()))]
    (folder / NAME).write_text("\n".join(lines) + "\n")


def read(folder):
    """Return (purpose, digests); ("", {}) without a manifest."""
    path = folder / NAME
    if not path.is_file():
        return "", {}
    head, *lines = path.read_text().splitlines()
    digests = dict(reversed(line.split("  ", 1)) for line in lines)
    return head.removeprefix("# "), digests


def is_complete(folder, purpose):
    """Return true if the folder was gathered for this purpose, and each file is unchanged.

    Reads only files that are newer than the manifest; `problems` reads all, which takes minutes.
    """
    written, digests = read(folder)
    if written != purpose:
        return False
    finished = (folder / NAME).stat().st_mtime_ns
    return all(
        path.is_file() and (path.stat().st_mtime_ns <= finished or sha256(path) == digest)
        for path, digest in ((folder / name, digest) for name, digest in digests.items())
    )


def problems(folder, purpose):
    """Read every file, and return a sentence for each problem of the folder."""
    written, digests = read(folder)
    if not written:
        return [f"{folder} is missing or was not completed. Run: make bundle"]
    if written != purpose:
        return [f"{folder} was made for other machines or another stack. Run: make bundle"]
    sentences = []
    for name, digest in digests.items():
        path = folder / name
        if not path.is_file():
            sentences.append(f"{path} is missing. Run: make bundle")
        elif sha256(path) != digest:
            sentences.append(
                f"{path} is broken: its SHA-256 is not that of the manifest. Delete it, then run: "
                "make bundle"
            )
    return sentences
