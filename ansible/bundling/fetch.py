"""Download files. Complete files are not fetched again, and partial files are continued.

The modules of bundling/ call `fetch_all` and show the progress with Progress.
"""

import os
import sys
import urllib.error
import urllib.request
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from bundling.manifest import sha256
from contract.errors import UserError

TIMEOUT_SECONDS = 60  # without a byte from the server


@dataclass(frozen=True)
class File:
    """A file to download, its path here, and its checksum; `sha256` is "" if unknown."""

    url: str
    path: Path
    sha256: str
    size: int | None = None


class Progress:
    """Show a bar on a terminal, otherwise print one line per file."""

    def __init__(self, terminal=""):
        self.stream = sys.stderr
        if terminal:
            # O_NOCTTY: this process may have no controlling terminal, and must not get this one.
            # After `su` the terminal belongs to the earlier user, and cannot be opened.
            with suppress(OSError):
                self.stream = os.fdopen(os.open(terminal, os.O_WRONLY | os.O_NOCTTY), "w")
        self.is_terminal = self.stream.isatty()
        self.trusted = []  # sentences about files whose publisher states no checksum

    def say(self, line):
        if not self.is_terminal:
            print(line, flush=True)

    def trust(self, name, digest):
        """Warn, with a bar or without one, that no publisher's checksum confirms a file."""
        self.trusted.append(
            f"{name}: its publisher states no SHA-256, so Tandem trusts this file and later "
            f"rejects a different file. Compare its SHA-256 with a second source: {digest}"
        )
        print(self.trusted[-1], flush=True)

    def begin(self, label):
        """Print a title, since the bar may not move in the first minute."""
        print(f"tandem: gathering {label}", file=self.stream, flush=True)

    @contextmanager
    def bar(self, label, total, unit="B"):
        """Show a bar within a block. Yields the function that advances it by a number of units."""
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


def fetch_all(files, label, progress, proxy=""):
    """Download `files` to their paths. Raises UserError at the first failure."""
    # ProxyHandler(None) uses the proxy of this process's environment.
    handler = urllib.request.ProxyHandler({"http": proxy, "https": proxy} if proxy else None)
    opener = urllib.request.build_opener(handler)
    missing = []
    for file in files:
        if not file.path.is_file() or file.sha256 not in ("", sha256(file.path)):
            missing.append(file)
    size = sum(file.size or 0 for file in missing) or None
    with progress.bar(label, size) as advance:
        for number, file in enumerate(missing, 1):
            progress.say(f"{label}: {number}/{len(missing)} {file.path.name}")
            fetch(file, opener, advance)


def fetch(file, opener, advance):
    """Download a file to `<name>.part`, then rename it. Raises UserError.

    A broken connection leaves the partial file for the next call.
    """
    partial = file.path.with_name(file.path.name + ".part")
    partial.parent.mkdir(parents=True, exist_ok=True)
    try:
        present_bytes = partial.stat().st_size if partial.exists() else 0
        headers = {"Range": f"bytes={present_bytes}-"} if present_bytes else {}
        # The addresses come from stacks.yml and apt.
        request = urllib.request.Request(file.url, headers=headers)  # noqa: S310
        with opener.open(request, timeout=TIMEOUT_SECONDS) as answer:
            # A server that ignores Range answers 200, and sends the file from its beginning.
            is_continued = answer.status == 206
            advance(present_bytes if is_continued else 0)
            with partial.open("ab" if is_continued else "wb") as output:
                while block := answer.read(1 << 18):
                    output.write(block)
                    advance(len(block))
    except urllib.error.HTTPError as error:
        # 416 (range not satisfiable) means that the partial file is complete.
        if error.code != 416:
            raise _fetch_error(file, f"the server answered {error.code} {error.reason}") from None
    except (OSError, urllib.error.URLError) as error:
        raise _fetch_error(file, error) from None
    if file.sha256 not in ("", sha256(partial)):
        partial.unlink()  # otherwise every later call would append to a wrong file
        raise UserError(
            f"{file.url} is not the expected file, because its SHA-256 differs. Tandem "
            "deleted it. Run the same command again; if this happens again, ask its "
            "publisher, or use another mirror"
        )
    partial.rename(file.path)


def _fetch_error(file, reason):
    return UserError(
        f"{file.url} could not be downloaded: {reason}. Run the same command again: it "
        "continues with the missing files"
    )
