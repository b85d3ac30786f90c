"""Reads requirements.txt, and the files that it includes by -r and -c, as pip reads them.

build_script.py finds and reads the file. layer.py writes new files for uv from the values, because
two programs may read the same file differently. A line that is a comment for one program might make
the other one build a source package, which runs code of a stranger. Therefore each line is either
understood completely or rejected.
"""

from __future__ import annotations

import getopt
import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from contract.errors import UserError
from contract.options import path_of
from contract.text import decode_text, pluralize, read_bytes
from launcher.folders import relative
from launcher.plan.pip_settings import absolute

# Limits for files that a stranger may have written.
MAX_FILES, MAX_FILE_BYTES = 64, 4 << 20
MAX_LINES, MAX_LINE_LENGTH = 10_000, 1 << 16
# A line such as `# -*- coding: latin-1 -*-`, as the first or second line.
CODING = re.compile(rb"(?:[^\n]*\n)?#[^\n]*?coding[:=]\s*([-\w.]+)")
# The byte order mark of UTF-32-LE begins with that of UTF-16-LE, so UTF-32-LE comes first.
UNICODE_ENCODINGS = ("utf-8", "utf-32-le", "utf-32-be", "utf-16-le", "utf-16-be")
COMMENT = re.compile(r"(^|(?<=\s))#.*$")
# Printable characters except a backslash, which would continue the line in the file for uv.
REQUIREMENT = re.compile(r"[\t -\[\]-~]+")
WHEEL = re.compile(r"https://[\w.~:/@!&=+,%-]+\.whl(#sha256=[0-9a-f]{64})?", re.ASCII)
ARCHIVES = (".whl", ".zip", ".gz", ".bz2", ".xz", ".tar", ".tgz")
ADDRESS, PATH = r"https?://[!-~]+", r"(?!\w+://).+"
# The options of pip that are supported, and their values. Tandem always behaves like the last two.
PIP_OPTIONS = {
    "requirement": PATH,
    "constraint": PATH,
    "hash": r"sha(256|384|512):[0-9a-f]{64,128}",
    "index-url": ADDRESS,
    "extra-index-url": ADDRESS,
    "find-links": f"{ADDRESS}|{PATH}",
    "trusted-host": r"[A-Za-z0-9.:\[\]-]+",
    "no-index": "",
    "pre": "",
    "prefer-binary": "",
    "only-binary": ":all:",
}
SHORT_OPTIONS = {"r": "requirement", "c": "constraint", "i": "index-url", "f": "find-links"}
OWN_WHEEL = (
    "Only wheels are installed, because a source runs code while it is built: if you trust it, "
    "make a wheel of it (`pip wheel --wheel-dir FOLDER ...`) and add the line `--find-links "
    "FOLDER`."
)
REMEDY = (
    "Tandem supports `name[extra]>=1.0; marker --hash=sha256:...`, `name @ https://....whl` "
    f"and {', '.join(f'--{name}' for name in PIP_OPTIONS)} :all:. Instead of a file or a folder, "
    "write names and versions (`pip list --format=freeze > requirements.txt` lists those of "
    "a conda environment). Tandem does not expand variables, because an address could send "
    "their values to anybody: put the password of an index into pip's own settings or "
    "~/.netrc. "
)


@dataclass(frozen=True)
class Package:
    """Describes a required package; its name is canonical."""

    requirement: Requirement
    hashes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.requirement.name

    @property
    def version(self) -> str:
        """The version to which the package is pinned by ==, or an empty string."""
        pins = (clause.version for clause in self.requirement.specifier if clause.operator == "==")
        return next(pins, "")

    def line(self) -> str:
        """Return the package as a line of a requirements file."""
        return " ".join([str(self.requirement), *(f"--hash={digest}" for digest in self.hashes)])


@dataclass(frozen=True)
class RequirementsFile:
    """Holds the contents of a requirements file and of the files that it includes."""

    path: Path
    packages: tuple[Package, ...]
    constraints: tuple[Package, ...]
    options: tuple[tuple[str, str], ...]  # of pip: (name without --, value), in their order


def find_requirements(folders: Iterable[Path], typed: str | None) -> Path | None:
    """Return the file that the user typed as REQUIREMENTS=. Otherwise return requirements.txt of
    the first folder that has this file, or None. Raises UserError."""
    if typed:
        path = path_of("REQUIREMENTS", typed)
        if not path.is_file():
            raise UserError(f"REQUIREMENTS={typed}: there is no file {path}.")
        return path
    files = (folder / "requirements.txt" for folder in folders)
    return next((path for path in files if path.is_file()), None)


def read_requirements(path: Path) -> RequirementsFile:
    """Read a requirements file. Raises UserError, with all lines that Tandem rejects."""
    # Dictionaries keep each package once, in the order of the lines.
    packages: dict[str, dict[Package, None]] = {"requirement": {}, "constraint": {}}
    options: list[tuple[str, str]] = []
    lines: list[str] = []  # of all files
    rejected: list[str] = []  # lines that Tandem cannot use, for the message
    files: set[tuple[Path, str]] = set()  # (real path, kind) of all files that were read
    folder = path.parent.resolve()

    def read_file(path: Path, kind: str) -> None:
        """Read a file whose packages are of this kind, "requirement" or "constraint"."""
        real_path = path.resolve()
        if (real_path, kind) in files:  # files may include each other
            return
        files.add((real_path, kind))
        if real_path.suffix not in (".txt", ".in") and not real_path.is_relative_to(folder):
            raise UserError(
                f"{path} is outside {folder}, and its name does not end in .txt or .in. If it "
                "is a list of packages, rename it: Tandem would send its lines to a package "
                "index, so it must not be a secret."
            )
        # Decode the file as pip does: by a byte order mark, a coding line, or else as UTF-8.
        try:
            content = read_bytes(path, MAX_FILE_BYTES)
            encodings = (e for e in UNICODE_ENCODINGS if content.startswith("\ufeff".encode(e)))
            if mark := next(encodings, None):
                text = content.decode(mark)[1:]
            else:
                coding = CODING.match(content)
                text = decode_text(content, coding[1].decode() if coding else "utf-8")
            new_lines = [*join_lines(text)]
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UserError(
                f"{path} cannot be read: {reason}. Correct its name, or save it as UTF-8."
            ) from None
        lines.extend(new_lines)
        if len(files) > MAX_FILES or len(lines) > MAX_LINES:
            raise UserError(
                f"{relative(path)}: with -r and -c it has more than {MAX_FILES} files or "
                f"{MAX_LINES:,} lines, which is the limit: shorten it."
            )
        for line in new_lines:
            try:
                package, line_options = parse_line(line)
                if package:
                    packages[kind][package] = None
                for name, value in line_options:
                    if name in packages:  # -r or -c
                        read_file(path.parent / value, name)
                    elif name == "find-links":
                        options.append((name, absolute(value, path.parent)))
                    else:
                        options.append((name, value))
            except (ValueError, RuntimeError):
                shown = re.sub(r"//[^/@\s]*@", "//***@", line)[:120]  # without a password
                rejected.append(f"{shown} (in {relative(path)})" if len(files) > 1 else shown)

    read_file(path, "requirement")
    if rejected:
        raise UserError(
            f"{relative(path)} has {pluralize(len(rejected), 'line')} that Tandem cannot use: "
            f"{'; '.join(rejected)}. {REMEDY}{OWN_WHEEL}"
        )
    required, constraints = packages.values()
    return RequirementsFile(path, tuple(required), tuple(constraints), tuple(options))


def join_lines(text: str) -> Iterator[str]:
    """Yield the lines of a text as pip reads them: without comments, and with continued lines
    joined. A comment ends with its line, even if the line ends in a backslash."""
    joined = ""
    for line in [*text.splitlines(), ""]:
        content = COMMENT.sub("", line)
        if content == line and line.endswith("\\"):
            joined += line[:-1]
            continue
        if joined := (joined + content).strip():
            yield joined
        joined = ""


def parse_line(line: str) -> tuple[Package | None, list[tuple[str, str]]]:
    """Return the package that a line requires, or the options of pip in the line. Raises ValueError
    or RecursionError unless the line is understood completely."""
    if len(line) > MAX_LINE_LENGTH:
        raise ValueError
    # Options begin at the first - after a space: `tool==1.0 --hash=sha256:0123...`.
    text, *words = re.split(r"(?:^|(?<=\s))(?=-)", line, maxsplit=1)
    # For getopt, `=` marks an option that has a value.
    long_options = [name + ("=" if pattern else "") for name, pattern in PIP_OPTIONS.items()]
    try:
        pairs, surplus = getopt.getopt(shlex.split("".join(words)), "r:c:i:f:", long_options)
    except getopt.GetoptError as error:
        raise ValueError(str(error)) from None
    typed = [(name.strip("-"), value) for name, value in pairs]
    options = [(SHORT_OPTIONS.get(name, name), value) for name, value in typed]
    names = {name for name, _ in options}
    is_known = all(re.fullmatch(PIP_OPTIONS[name], value) for name, value in options)
    if surplus or not is_known or "${" in line or not line.replace("\t", " ").isprintable():
        raise ValueError
    if not text:
        # pip ignores other options on a line with -r or -c, so such a line is rejected.
        if "hash" in names or (names & {"requirement", "constraint"} and len(options) > 1):
            raise ValueError
        return None, options
    if names - {"hash"} or not REQUIREMENT.fullmatch(text):
        raise ValueError
    requirement = Requirement(text)
    # pip takes the name `tool.whl` for a file. uv does not support every version after ===.
    is_file = requirement.name.lower().endswith(ARCHIVES)
    if is_file or "===" in text or (requirement.url and not WHEEL.fullmatch(requirement.url)):
        raise ValueError
    requirement.name = canonicalize_name(requirement.name, validate=True)
    requirement.extras = {canonicalize_name(extra, validate=True) for extra in requirement.extras}
    str(requirement)  # raises ValueError for a marker that cannot be written
    return Package(requirement, tuple(value for _, value in options)), []
