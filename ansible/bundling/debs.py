"""Make a repository of Debian packages with their dependencies, for any release: `make bundle`.

apt finds the dependencies with a separate configuration, sources and state, so this file changes
nothing of this machine's apt. For apt the target has no packages at all, so that the repository is
complete for every installation of the release. Role offline makes apt on the targets use it.
"""

import hashlib
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

import yaml

from bundling import manifest
from bundling.fetch import File, fetch_all
from contract.errors import UserError
from planning.share import KINDS

ANSIBLE = Path(__file__).resolve().parents[1]
# The folder for apt's lists and cache, which the next call uses again.
STATE = ANSIBLE.parent / "bundle" / "apt"
ARCHITECTURE = "amd64"
INDEX = "Packages"
APT_CONF = """\
Dir::Etc::parts "/dev/null";
Dir::Etc::main "/dev/null";
Dir::Etc::sourcelist "{root}/sources.list";
Dir::Etc::sourceparts "/dev/null";
Dir::Etc::preferences "/dev/null";
Dir::Etc::preferencesparts "/dev/null";
Dir::State "{root}";
Dir::State::status "{root}/status";
Dir::State::lists "{root}/lists";
Dir::Cache "{root}/cache";
Acquire::Languages "none";
APT::Architecture "amd64";
APT::Architectures {{ "amd64"; }};
APT::Install-Recommends "false";
APT::Sandbox::User "";
"""


@dataclass(frozen=True)
class Debs:
    """An order for one release: packages, their sources, and the folder of the repository."""

    release: str  # the code name: "bookworm"
    packages: tuple[str, ...]
    sources: tuple[str, ...]  # lines of sources.list
    keyring: Path
    keyring_package: str
    folder: Path
    state: Path

    def purpose(self):
        text = "\n".join([*self.packages, *self.sources])
        return f"debs {hashlib.sha256(text.encode()).hexdigest()}"


def plan(release, packages, mirrors, bundle):
    """Plan a code name's packages. `mirrors`: {name in releases.yml: URL}. Raises UserError."""
    table = yaml.safe_load((ANSIBLE / "releases.yml").read_text())
    if release not in table["releases"]:
        raise UserError(
            f"release {release!r} is not in ansible/releases.yml, which has "
            f"{', '.join(table['releases'])}. To see a machine's release, type on it: . "
            "/etc/os-release; echo $VERSION_CODENAME"
        )
    distribution = table["distributions"][table["releases"][release]["distribution"]]
    options = f"[arch={ARCHITECTURE} signed-by={distribution['keyring']}]"
    components = " ".join(distribution["components"])
    return Debs(
        release=release,
        packages=tuple(sorted(packages)),
        sources=tuple(
            f"deb {options} {mirrors[row['mirror']]} {row['suite'].format(release=release)} "
            f"{components}"
            for row in distribution["suites"]
        ),
        keyring=Path(distribution["keyring"]),
        keyring_package=distribution["keyring_package"],
        folder=bundle / "debs" / f"{release}-{ARCHITECTURE}",
        state=STATE / release,
    )


def role_packages(roles=ANSIBLE / "roles"):
    """List the packages that any role may install: its `<role>_packages`, and those of all shares.

    Raises UserError for a name with a template, since no machine's facts are known here.
    """
    packages = set()
    for path in sorted([*roles.glob("*/defaults/main.yml"), *roles.glob("*/vars/main.yml")]):
        role = path.parents[1].name
        # A list, or a mapping of lists: {"debian": [...], "ubuntu": [...]}.
        listed = (yaml.safe_load(path.read_text()) or {}).get(f"{role}_packages", [])
        lists = listed.values() if isinstance(listed, dict) else [listed]
        names = [name for names in lists for name in names]
        if isinstance(listed, str) or any("{{" in name for name in names):
            raise UserError(
                f"{role}_packages in {path} is not literal: `make bundle` could not know the names"
            )
        packages.update(names)
    for kind in KINDS.values():
        packages.update(kind.server_packages, kind.client_packages)
    return packages


def gather(order, progress):
    """Fetch the packages of an order, unless the folder is complete. Raises UserError."""
    if manifest.is_complete(order.folder, order.purpose()):
        return
    # The folder has no manifest until it is complete.
    (order.folder / manifest.NAME).unlink(missing_ok=True)
    order.folder.mkdir(parents=True, exist_ok=True)
    environment = _private_apt(order)
    _apt(order, environment, "update", "--error-on=any")
    files, index = _resolve(order, environment)
    fetch_all(files, f"packages {order.release}", progress, _proxy(environment))
    # A file of an earlier order is not in the index, and would only fill the machines' disks.
    names = {file.path.name for file in files}
    for path in order.folder.iterdir():
        if path.name not in names:
            path.unlink()
    (order.folder / INDEX).write_text(index)
    digests = {path.name: manifest.sha256(path) for path in order.folder.iterdir()}
    manifest.write(order.folder, order.purpose(), digests)


def _private_apt(order):
    """Make the environment in which apt sees only the target's release."""
    if shutil.which("apt-get") is None:
        raise UserError(
            "this machine has no apt-get, which downloads the packages: run `make bundle` on "
            "Debian or Ubuntu, and copy the folder bundle/ to this machine"
        )
    if not order.keyring.is_file():
        raise UserError(
            f"the keys of {order.release}'s archive are missing here ({order.keyring}): "
            f"sudo apt install {order.keyring_package}"
        )
    for folder in ("lists/partial", "cache/archives/partial"):
        (order.state / folder).mkdir(parents=True, exist_ok=True)
    (order.state / "status").write_text("")  # no package is installed on the target
    (order.state / "sources.list").write_text("\n".join(order.sources) + "\n")
    # Proxies and certificates of this machine's apt: 'Acquire::http::Proxy "http://proxy:3128";'.
    dumped = subprocess.run(["apt-config", "dump"], stdout=subprocess.PIPE, text=True, check=True)
    acquire = [line for line in dumped.stdout.splitlines() if line.startswith("Acquire::")]
    apt_conf = APT_CONF.format(root=order.state.resolve())
    configuration = order.state / "apt.conf"
    configuration.write_text("\n".join([*acquire, apt_conf]))
    return {**os.environ, "APT_CONFIG": str(configuration.resolve()), "LC_ALL": "C"}


def _apt(order, environment, *words):
    """Run apt-get in the environment of `_private_apt`; return its output. Raises UserError."""
    process = subprocess.run(
        ["apt-get", "--quiet", *words], env=environment, capture_output=True, text=True
    )
    if process.returncode:
        errors = [line[3:] for line in process.stderr.splitlines() if line.startswith("E: ")]
        raise UserError(
            f"apt-get could not do {words[0]!r} for {order.release}: "
            f"{' '.join(errors) or process.stderr.strip()}"
        )
    return process.stdout


def _resolve(order, environment):
    """Return the Files that `apt-get install` would fetch, and the repository's index of them."""
    printed = _apt(order, environment, "install", "--yes", "--print-uris", *order.packages)
    # 'http://deb.debian.org/debian/pool/main/r/rsync/rsync_3.2.7-1_amd64.deb' rsync_... 417040 ...
    rows = re.findall(r"^'(\S+)' (\S+) (\d+) ", printed, re.MULTILINE)
    sources = {unquote(url.rsplit("/", 1)[1]): (url, int(size)) for url, _, size in rows}
    # apt prints only MD5 sums there, so the SHA-256 comes from the archive's entries, of which each
    # version of a package has one.
    process = subprocess.run(
        ["apt-cache", "show", *(name.split("_")[0] for name in sources)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    texts = process.stdout.strip().split("\n\n")
    entries = [(dict(re.findall(r"^(\S+): (.+)$", text, re.MULTILINE)), text) for text in texts]
    digests = {Path(fields["Filename"]).name: fields["SHA256"] for fields, _ in entries}
    files = [
        File(url, order.folder / name, digests[name], size) for name, (url, size) in sources.items()
    ]
    # The archive's entries have paths in its pool, "Filename: pool/main/r/rsync/rsync_...". The
    # index has the same entries with paths in the folder.
    file_names = {file.sha256: file.path.name for file in files}
    index_entries = {
        digest: re.sub(
            r"^Filename: .*$", f"Filename: ./{file_names[digest]}", text, flags=re.MULTILINE
        )
        for fields, text in entries
        if (digest := fields["SHA256"]) in file_names
    }
    return files, "\n\n".join(index_entries[digest] for digest in file_names) + "\n"


def _proxy(environment):
    """Read the proxy that this machine's apt uses; "" for none."""
    process = subprocess.run(
        ["apt-config", "shell", "PROXY", "Acquire::http::Proxy"],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    match = re.search(r"PROXY='(.*)'", process.stdout)
    return match[1] if match else ""
