"""Downloads: what is complete is not fetched again, and what is partial is resumed."""

import os
import sys
import urllib.error
import urllib.request
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from bundling.manifest import sha256
from contract.errors import UserError

SECONDS = 60


@dataclass(frozen=True)
class File:
    """A file to download, where it goes, and its checksum; `sha256` is empty if not known."""

    url: str
    path: Path
    sha256: str
    size: int | None = None


class Progress:
    """A bar on a terminal (given by path, since Ansible hides ours), else one line per file."""

    def __init__(self, terminal=""):
        self.stream = _open_terminal(terminal) if terminal else sys.stderr
        self.is_terminal = self.stream.isatty()
        self.trusted = []  # sentences about files whose publisher states no checksum

    def say(self, line):
        if not self.is_terminal:
            print(line, flush=True)

    def trust(self, name, digest):
        """Says, with a bar or without one, that nobody but the file itself vouches for it."""
        self.trusted.append(
            f"{name}: its publisher states no SHA-256, so the file that came is trusted, and any "
            f"other one is refused from now on. Compare its SHA-256 with that of a second source: "
            f"{digest}"
        )
        print(self.trusted[-1], flush=True)

    def begin(self, label):
        """Says what follows: before its bar moves, an archive or an index is asked for a minute."""
        print(f"tandem: gathering {label}", file=self.stream, flush=True)

    @contextmanager
    def bar(self, label, total, unit="B"):
        """Yields a function that takes how much more was done."""
        with tqdm(
            total=total,
            desc=label,
            unit=unit,
            unit_scale=unit == "B",
            file=self.stream,
            disable=not self.is_terminal,
            dynamic_ncols=True,
        ) as bar:
            yield bar.update


def _open_terminal(path):
    # NOCTTY: a process without a terminal of its own must not make this one its own.
    try:
        return os.fdopen(os.open(path, os.O_WRONLY | os.O_NOCTTY), "w")
    except OSError:  # after `su` the terminal is still the other user's
        return sys.stderr


def fetch_all(files, label, progress, proxy=""):
    """Downloads `files` to their paths. Raises UserError at the first that fails."""
    handler = urllib.request.ProxyHandler({"http": proxy, "https": proxy} if proxy else None)
    opener = urllib.request.build_opener(handler)
    missing = [
        file
        for file in files
        if not file.path.is_file() or file.sha256 not in ("", sha256(file.path))
    ]
    size = sum(file.size or 0 for file in missing) or None
    with progress.bar(label, size) as advance:
        for number, file in enumerate(missing, 1):
            progress.say(f"{label}: {number}/{len(missing)} {file.path.name}")
            fetch(file, opener, advance)


def fetch(file, opener, advance):
    """Downloads one file by way of `<name>.part`, which is kept if the connection breaks."""
    part = file.path.with_name(file.path.name + ".part")
    part.parent.mkdir(parents=True, exist_ok=True)
    try:
        _continue(file, part, opener, advance)
    except urllib.error.HTTPError as error:
        if error.code != 416:  # 416: nothing is left to fetch
            raise _fetch_error(file, f"the server said {error.code} {error.reason}") from None
    except (OSError, urllib.error.URLError) as error:
        raise _fetch_error(file, error) from None
    if file.sha256 not in ("", sha256(part)):
        part.unlink()
        raise UserError(
            f"{file.url} is not the file that was expected: its SHA-256 differs. It was deleted. "
            "Run the same command again; if it happens again, ask its publisher or another mirror"
        )
    part.rename(file.path)


def _continue(file, part, opener, advance):
    present_bytes = part.stat().st_size if part.exists() else 0
    headers = {"Range": f"bytes={present_bytes}-"} if present_bytes else {}
    request = urllib.request.Request(file.url, headers=headers)  # noqa: S310 (of stacks.yml and apt)
    with opener.open(request, timeout=SECONDS) as answer:
        # 200 instead of 206: the server sends the file from its beginning.
        is_continued = answer.status == 206
        advance(present_bytes if is_continued else 0)
        with part.open("ab" if is_continued else "wb") as output:
            while block := answer.read(1 << 18):
                output.write(block)
                advance(len(block))


def _fetch_error(file, reason):
    return UserError(
        f"{file.url} could not be fetched: {reason}. Run the same command again: what is there "
        "already is kept"
    )
