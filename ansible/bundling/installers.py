"""Download the installers of a stack in stacks.yml: NVIDIA's driver, CUDA toolkit and apex.

ansible/bundle.py and ansible/toolkit_files.py call `gather` with an order. A person has to download
a file without an address; an error lists the file, its page and the folder. If the publisher states
no SHA-256, the manifest records the SHA-256 of the first download.
"""

import hashlib
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

from bundling import manifest
from bundling import table as stacks
from bundling.fetch import File, fetch_all
from contract import git
from contract.errors import UserError


@dataclass(frozen=True)
class Installer:
    """A file. `url` is "" if a person has to go to `page`; `sha256` is "" if it is unknown."""

    name: str
    url: str
    page: str
    sha256: str
    commit: str = ""  # in the git repository `url`, from which the file is made


@dataclass(frozen=True)
class Installers:
    """An order: the files of one folder of the bundle."""

    files: tuple[Installer, ...]
    folder: Path

    def purpose(self):
        text = json.dumps([vars(file) for file in self.files])
        return f"installers {hashlib.sha256(text.encode()).hexdigest()}"


def plan(stack, settings, bundle, table=None):
    """Plan the folders for a row of stacks.yml. Raises UserError.

    settings: {"toolkit", "apex", "driver_version"} as in group_vars; table: replaces stacks.yml in
    tests.
    """
    table = table or stacks.read()
    row = stacks.row(table, stack)
    entries = {}
    if row.get("driver"):
        # The newest driver comes first in the table.
        version = str(settings["driver_version"])
        drivers = [
            entry for entry in table["drivers"] if version in ("auto", str(entry["version"]))
        ]
        if not drivers or _numbers(drivers[0]["version"]) < _numbers(row["driver"]):
            which = "" if version == "auto" else f" {version}, but this stack needs one"
            sentence = f"no driver{which} of version {row['driver']} or newer"
            raise UserError(f"ansible/stacks.yml has {sentence}")
        entries[stack] = drivers[:1]
    if row.get("toolkit") and _is_wanted(settings["toolkit"], row.get("toolkit_default")):
        entries[f"toolkit-{row['toolkit']}"] = table["toolkits"][row["toolkit"]]
    if row.get("apex") and _is_wanted(settings["apex"], default=True):
        entries[f"apex-{row['apex']}"] = [table["apex"][row["apex"]]]
    folder = bundle / "installers"
    return [Installers(tuple(map(_installer, entries[name])), folder / name) for name in entries]


def _is_wanted(word, default):
    word = str(word).lower()
    return word == "true" or (word == "auto" and bool(default))


def _numbers(version):
    return [int(number) for number in str(version).split(".")]


def _installer(entry):
    """Make the Installer of an entry of stacks.yml."""
    # The url of a driver is that of its file. Other entries have `file`, and the url of a folder.
    name, url = entry.get("file"), entry.get("url") or ""
    return Installer(
        name=name or url.rsplit("/", 1)[1],
        url=entry.get("git") or (url + name if url and name else url),
        commit=entry.get("commit") or "",
        page=entry.get("page") or "",
        sha256=entry.get("sha256") or "",
    )


def plan_conda(url, sha256, bundle):
    """Plan conda's installer from a URL, for machines without internet."""
    file = Installer(name=url.rsplit("/", 1)[1], url=url, page=url, sha256=sha256)
    return Installers((file,), bundle / "installers" / "conda")


def gather(order, progress):
    """Fetch the files of an order. Raises UserError with all files that a person has to fetch."""
    order.folder.mkdir(parents=True, exist_ok=True)
    # The present manifest stays, since it may be the only record of a first download's checksum.
    _, recorded = manifest.read(order.folder)
    expected = {file.name: file.sha256 or recorded.get(file.name, "") for file in order.files}
    public = [
        File(file.url, order.folder / file.name, expected[file.name])
        for file in order.files
        if file.url and not file.commit
    ]
    fetch_all(public, f"installers {order.folder.name}", progress)
    for file in order.files:
        if file.commit and not (order.folder / file.name).is_file():
            pack_commit(file.url, file.commit, order.folder / file.name)
    # The error comes after the downloads, so that afterwards only these files are missing.
    problems = []
    for file in order.files:
        path, digest = order.folder / file.name, expected[file.name]
        if file.url:
            continue
        if not path.is_file():
            remedy = f"get it from {file.page} and put it into {order.folder}"
            problems.append(f"you must download {file.name} yourself: {remedy}")
        elif digest and manifest.sha256(path) != digest:
            problems.append(
                f"{path} is not the expected file: its SHA-256 is not {digest}. Download it "
                f"again from {file.page}"
            )
    if problems:
        raise UserError("\n".join(problems))
    digests = {name: manifest.sha256(order.folder / name) for name in expected}
    for file in order.files:
        if not file.commit and not expected[file.name]:
            progress.trust(file.name, digests[file.name])
    manifest.write(order.folder, order.purpose(), digests)


def pack_commit(url, commit, path):
    """Write the files of a git commit to `path`, a .tar.gz with one folder. Raises UserError."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".git-") as folder:
        _git(folder, "init", "--quiet")
        # The id is a checksum of all files, and git compares it with what it receives.
        _git(folder, "fetch", "--quiet", "--depth=1", url, commit)
        partial = path.with_name(path.name + ".part")
        prefix = f"--prefix={path.name.removesuffix('.tar.gz')}/"
        _git(folder, "archive", "--format=tar.gz", prefix, f"--output={partial}", commit)
        partial.rename(path)


def _git(folder, *words):
    try:
        git.run(Path(folder), *words, online=True)
    except UserError as error:
        raise UserError(f"git {words[0]} of {words[-1]} failed: {error}") from None
