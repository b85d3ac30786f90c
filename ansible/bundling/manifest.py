"""Write and check the list of a bundle folder's files, in the format of `sha256sum --check`.

The modules of bundling/ write the manifest last, so a folder with a manifest was complete. The
first line is the purpose of the folder, for example "# lock <sha>".
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
    """Write the manifest. purpose: a line; digests: {file name: SHA-256}."""
    lines = [f"# {purpose}", *(f"{digest}  {name}" for name, digest in sorted(digests.items()))]
    (folder / NAME).write_text("\n".join(lines) + "\n")


def read(folder):
    """Return (purpose, digests); ("", {}) without a manifest."""
    path = folder / NAME
    if not path.is_file():
        return "", {}
    # "0123...  NVIDIA-Linux-x86_64-580.95.05.run"
    head, *lines = path.read_text().splitlines()
    digests = dict(reversed(line.split("  ", 1)) for line in lines)
    return head.removeprefix("# "), digests


def is_complete(folder, purpose):
    """Return true if the folder was gathered for this purpose, and each file is unchanged."""
    stored_purpose, digests = read(folder)
    if stored_purpose != purpose:
        return False
    # Only files that are newer than the manifest are read: reading all takes minutes.
    manifest_time = (folder / NAME).stat().st_mtime_ns
    return all(
        path.is_file() and (path.stat().st_mtime_ns <= manifest_time or sha256(path) == digest)
        for path, digest in ((folder / name, digest) for name, digest in digests.items())
    )


def problems(folder, purpose):
    """Read every file, and return a sentence for each problem of the folder."""
    stored_purpose, digests = read(folder)
    if not stored_purpose:
        return [f"{folder} is missing or was not completed. Run: make bundle"]
    if stored_purpose != purpose:
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
