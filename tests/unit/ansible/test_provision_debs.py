"""Packages for a release: the plan, and the real apt with a small archive made by the test."""

import re
import subprocess
import textwrap
from pathlib import Path

import pytest
import yaml

from contract.errors import UserError
from tests.unit.ansible.provision_machines import ROOT, load, parsed, tasks_of

bundle = load("ansible/bundle.py")
debs, manifest = bundle.debs, bundle.manifest
Progress = bundle.fetch.Progress

MIRRORS = yaml.safe_load((ROOT / "group_vars/all.yml").read_text())["mirrors"]
RELEASES = yaml.safe_load((ROOT / "ansible/releases.yml").read_text())["releases"]


@pytest.mark.parametrize("release", sorted(RELEASES))
@pytest.mark.parametrize("mirror", sorted(MIRRORS))
def test_every_release_has_its_sources_in_every_mirror(release, mirror, tmp_path):
    plan = debs.plan(release, {"nftables"}, MIRRORS[mirror], tmp_path)
    suites = [line.split()[4] for line in plan.sources]
    assert suites[0] == release and f"{release}-security" in suites
    distribution = RELEASES[release]["distribution"]
    assert all(line.split()[3].startswith(MIRRORS[mirror][distribution]) for line in plan.sources)
    assert all(f"signed-by=/usr/share/keyrings/{distribution}-archive-keyring.gpg" in line
               for line in plan.sources)  # fmt: skip


def test_a_missing_keyring_is_named_with_its_package(tmp_path):
    plan = debs.plan("noble", {"nftables"}, MIRRORS["world"], tmp_path)
    plan = debs.Debs(**{**vars(plan), "keyring": tmp_path / "none"})
    with pytest.raises(UserError, match="sudo apt install ubuntu-keyring"):
        debs.gather(plan, Progress())


@pytest.mark.parametrize("value", ["'{{ name }}'", "'{{ names }}'"])
def test_a_list_that_is_not_literal_is_refused(tmp_path, value):
    (tmp_path / "tool/defaults").mkdir(parents=True)
    (tmp_path / "tool/defaults/main.yml").write_text(f"tool_packages: [{value}]")
    with pytest.raises(UserError, match=r"tool_packages in .* is not literal"):
        debs.role_packages(tmp_path)


def test_what_roles_install_is_in_their_lists():
    """Each task that installs packages takes the names from lists that `make bundle` can read."""
    found = debs.role_packages()
    assert {"sysstat", "nftables", "python3-venv", "samba", "rsync", "ntfs-3g"} <= found
    tasks = (ROOT / "ansible/roles").glob("*/tasks/*.yml")
    for path in sorted(path for path in tasks if "uninstall" not in path.name):
        for task in tasks_of(parsed(path)):
            literal = {name for name in _installed(task) if "{{" not in name and "/" not in name}
            assert literal <= found, f"{path}: {literal - found}"
            asked = task.get("vars", {}).get("packages_wanted", "")
            own = rf"{{{{ {path.parents[1].name}_(packages|kind\.|planned\.)|$"
            for name in [asked] if isinstance(asked, str) else asked:
                assert name in found or re.match(own, name), (path, name)


def _installed(task):
    for module in ("ansible.builtin.package", "ansible.builtin.apt"):
        if module in task and task[module].get("state") != "absent":
            names = task[module].get("name", [])
            return names if isinstance(names, list) else [names]
    names = task.get("vars", {}).get("packages_wanted", [])
    return names if isinstance(names, list) else [names]


def make_package(archive: Path, name: str, depends: str = "") -> None:
    root = archive / name
    (root / "DEBIAN").mkdir(parents=True)
    control = f"Package: {name}\nVersion: 1:1.0+1\nArchitecture: all\nMaintainer: nobody\n"
    control += f"Depends: {depends}\n" if depends else ""
    (root / "DEBIAN/control").write_text(control + f"Description: {name}\n")
    file = archive / f"{name}_1.0+1_all.deb"
    subprocess.run(["dpkg-deb", "--build", root, file], check=True, stdout=subprocess.DEVNULL)
    stanza = control + textwrap.dedent(f"""\
        Filename: ./{file.name}
        Size: {file.stat().st_size}
        SHA256: {manifest.sha256(file)}
        Description: {name}
        """)
    with (archive / "Packages").open("a") as index:
        index.write(stanza + "\n")


@pytest.fixture
def plan(tmp_path):
    """`tool` depends on `library`; `other` is in the archive too."""
    archive = tmp_path / "archive"
    archive.mkdir()
    for name, depends in {"tool": "library", "library": "", "other": ""}.items():
        make_package(archive, name, depends)
    return debs.Debs(
        release="test",
        packages=("tool",),
        sources=(f"deb [trusted=yes] file:{archive} ./",),
        keyring=archive / "Packages",  # never read, since the source is trusted
        keyring_package="none",
        folder=tmp_path / "debs",
        state=tmp_path / "apt",
    )


def test_a_package_comes_with_what_it_depends_on_as_an_archive_for_apt(plan, tmp_path):
    debs.gather(plan, Progress())
    names = sorted(path.name for path in plan.folder.iterdir())
    assert names == [manifest.NAME, "Packages", "library_1.0+1_all.deb", "tool_1.0+1_all.deb"]
    assert manifest.problems(plan.folder, plan.purpose()) == []
    target = debs.Debs(
        *("test", ("tool",), (f"deb [trusted=yes] file:{plan.folder} ./",), plan.keyring),
        *("none", tmp_path / "second", tmp_path / "second-apt"),
    )
    debs.gather(target, Progress())
    assert manifest.read(target.folder)[1] == manifest.read(plan.folder)[1]


def test_a_half_gathered_folder_is_finished_and_old_packages_go(plan, capsys):
    lists = sorted(Path("/var/lib/apt/lists").rglob("*"))
    debs.gather(plan, Progress())
    capsys.readouterr()
    (plan.folder / manifest.NAME).unlink()
    (plan.folder / "tool_1.0+1_all.deb").unlink()
    (plan.folder / "old_0.1_all.deb").write_bytes(b"")
    debs.gather(plan, Progress())
    assert capsys.readouterr().out == "packages test: 1/1 tool_1.0+1_all.deb\n"
    assert not (plan.folder / "old_0.1_all.deb").exists()
    # The apt of this machine is left alone.
    assert sorted(Path("/var/lib/apt/lists").rglob("*")) == lists
    assert "Post-Invoke" not in (plan.state / "apt.conf").read_text()


def test_a_package_that_the_release_lacks_is_named(plan):
    wrong = debs.Debs(**{**vars(plan), "packages": ("missing-package",)})
    with pytest.raises(UserError, match=r"for test: Unable to locate package missing-package"):
        debs.gather(wrong, Progress())
