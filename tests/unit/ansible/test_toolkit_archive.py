"""cuDNN and NCCL go inside a toolkit and out again, whatever happens in between."""

import hashlib
import io
import os
import subprocess
import tarfile
from types import SimpleNamespace

import pytest

from tests.unit.ansible.provision_machines import load

archive = load("ansible/library/toolkit_archive.py")

LAYOUTS = {
    "cudnn-8.0.tgz": ("cuda/include/cudnn.h", "cuda/lib64/libcudnn.so.8.0.5", "libcudnn"),
    "cudnn-8.7.tar.xz": ("x-archive/include/cudnn.h", "x-archive/lib/libcudnn.so.8.7", "libcudnn"),
    "nccl.txz": ("nccl_2/include/nccl.h", "nccl_2/lib/libnccl.so.2.12.7", "libnccl"),
}  # fmt: skip


def make_tar(path, names, text="standin", more=()):
    """An archive in a vendor's layout: files, and the links of each library; more: members."""
    with tarfile.open(path, "w:gz" if str(path).endswith("gz") else "w:xz") as tar:
        for name in names:
            member = tarfile.TarInfo(name)
            content = f"{text} {name}".encode()
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
            if ".so." in name:
                link = tarfile.TarInfo(name.split(".so.")[0] + ".so")
                link.type, link.linkname = tarfile.SYMTYPE, name.rsplit("/")[-1]
                tar.addfile(link)
        for member in more:
            tar.addfile(member)
    return path


def member(name, kind=tarfile.REGTYPE, link="", mode=0o644):
    made = tarfile.TarInfo(name)
    made.type, made.linkname, made.mode = kind, link, mode
    return made


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def toolkit(tmp_path):
    """A toolkit as NVIDIA's installer leaves it: include and lib64 are links."""
    folder = tmp_path / "cuda-10.2"
    for name, link in (("include", "include"), ("lib", "lib64")):
        (folder / "targets/x86_64-linux" / name).mkdir(parents=True)
        (folder / link).symlink_to(f"targets/x86_64-linux/{name}")
    (folder / "include/cuda.h").write_text("theirs")
    (folder / ".tandem").mkdir()
    return folder


def tree(folder):
    return {
        str(path.relative_to(folder)): str(path.readlink())
        if path.is_symlink()
        else path.read_bytes()
        for path in folder.rglob("*")
        if path.is_symlink() or path.is_file()
    }


@pytest.mark.parametrize("file", LAYOUTS)
def test_each_layout_goes_in_with_its_links_and_out_again(toolkit, tmp_path, file):
    header, library, name = LAYOUTS[file]
    src = make_tar(tmp_path / file, [header, library, "x/LICENSE"])
    before = tree(toolkit)
    files = archive.install(str(toolkit), name[3:], str(src), digest(src))
    lib = library.rsplit("/")[-1]
    assert sorted(files) == [f"include/{name[3:]}.h", f"lib64/{name}.so", f"lib64/{lib}"]
    record = archive.read_record(str(toolkit), name[3:])
    assert record == {"sha256": digest(src), "files": sorted(files)}
    assert str((toolkit / f"lib64/{name}.so").readlink()) == lib
    assert archive.remove(str(toolkit), name[3:])
    assert tree(toolkit) == before
    assert not archive.remove(str(toolkit), name[3:])


CONTROL = """\
Package: {}
Version: 2.7.5
Architecture: amd64
Maintainer: standin <standin@example.org>
Description: standin
"""
LIBRARY = {"usr/lib/x86_64-linux-gnu/libnccl.so.2.7.5": b"x"}


def make_deb(folder, name, files):
    """A package of {path: content}."""
    root = folder / name
    for file, content in {**files, "DEBIAN/control": CONTROL.format(name).encode()}.items():
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_bytes(content)
    build = ["dpkg-deb", "--build", "--root-owner-group", root, f"{root}.deb"]
    subprocess.run(build, check=True, capture_output=True)
    return folder / f"{name}.deb"


def test_a_deb_that_holds_the_library_or_debs_that_do(toolkit, tmp_path):
    library = make_deb(tmp_path, "libnccl2", LIBRARY)
    dev = make_deb(tmp_path, "libnccl-dev", {"usr/include/nccl.h": b"x"})
    inner = {f"var/nccl-repo/{deb.name}": deb.read_bytes() for deb in (library, dev)}
    src = make_deb(tmp_path, "nccl-repo-ubuntu1804-2.7.5-ga-cuda10.2", inner)
    files = archive.install(str(toolkit), "nccl", str(src), digest(src))
    assert sorted(files) == ["include/nccl.h", "lib64/libnccl.so.2.7.5"]
    files = archive.install(str(toolkit), "nccl", str(library), digest(library))
    assert files == ["lib64/libnccl.so.2.7.5"]


def test_a_full_disk_is_not_called_a_broken_package(tmp_path, monkeypatch):
    says = "dpkg-deb: error: failed to write (No space left on device)"
    argv = ["sh", "-c", f"echo '{says}' >&2; exit 2"]
    run = subprocess.run
    monkeypatch.setattr(archive.subprocess, "run", lambda _, **options: run(argv, **options))
    with pytest.raises(OSError, match="No space left on device"):
        archive.extract_tar("x.deb", str(tmp_path / "x.tar"))


def present(toolkit, src, sha256=None, check_mode=False):
    params = {"toolkit": str(toolkit), "name": "nccl", "src": str(src)}
    params["sha256"] = sha256 or digest(src)
    return archive.ensure_present(SimpleNamespace(params=params, check_mode=check_mode))["changed"]


def test_present_is_what_its_record_says_and_the_disk_has(toolkit, tmp_path):
    header, library, _ = LAYOUTS["nccl.txz"]
    src, other = (make_tar(tmp_path / f"{text}.txz", [header, library], text) for text in "ab")
    before = tree(toolkit)
    with pytest.raises(archive.Refused, match=r"should be 0000.*broken"):
        present(toolkit, src, "0" * 64)
    assert present(toolkit, src, check_mode=True)
    assert tree(toolkit) == before
    assert present(toolkit, src)
    whole = tree(toolkit)
    assert not present(toolkit, src)
    (toolkit / "include/nccl.h").unlink()
    assert present(toolkit, src)
    assert tree(toolkit) == whole
    assert present(toolkit, other)
    assert not present(toolkit, other)
    record = archive.read_record(str(toolkit), "nccl")
    archive.write_record(str(toolkit), "nccl", None, record["files"])  # cut short
    assert present(toolkit, other)


@pytest.mark.parametrize("moved", [0, 2])
def test_a_kill_in_the_middle_is_finished_by_the_next_run_or_taken_out(
    toolkit, tmp_path, monkeypatch, moved
):
    header, library, _ = LAYOUTS["cudnn-8.0.tgz"]
    src = make_tar(tmp_path / "cudnn.tgz", [header, library])
    before, replace, done = tree(toolkit), os.replace, []

    def killed(source, target):
        if not str(target).endswith(".json"):
            if len(done) == moved:
                raise KeyboardInterrupt
            done.append(target)
        replace(source, target)

    monkeypatch.setattr(archive.os, "replace", killed)
    # A kill deletes nothing.
    monkeypatch.setattr(archive, "delete_temporary_folders", lambda folder: None)
    with pytest.raises(KeyboardInterrupt):
        archive.install(str(toolkit), "cudnn", str(src), digest(src))
    monkeypatch.undo()
    assert archive.read_record(str(toolkit), "cudnn")["sha256"] is None
    files = archive.install(str(toolkit), "cudnn", str(src), digest(src))
    assert all(os.path.lexists(toolkit / file) for file in files)
    monkeypatch.undo()
    assert archive.remove(str(toolkit), "cudnn")
    assert tree(toolkit) == before


def test_what_is_no_file_is_left_out_and_programs_stay_programs(toolkit, tmp_path):
    header, library, _ = LAYOUTS["cudnn-8.0.tgz"]
    more = [
        member("cuda/include/folder", tarfile.DIRTYPE),
        member("cuda/include/pipe", tarfile.FIFOTYPE),
        member("cuda/lib64/tool", mode=0o750),
    ]
    src = make_tar(tmp_path / "cudnn.tgz", [header, library], more=more)
    files = archive.install(str(toolkit), "cudnn", str(src), digest(src))
    assert not {"include/folder", "include/pipe"} & set(files)
    modes = [(toolkit / file).stat().st_mode & 0o777 for file in ("lib64/tool", "include/cudnn.h")]
    assert modes == [0o755, 0o644]


@pytest.mark.parametrize("again", [True, False])
def test_a_kill_during_a_change_of_versions_loses_no_file_of_either(
    toolkit, tmp_path, monkeypatch, again
):
    old, new = (
        make_tar(tmp_path / f"{version}.tgz", [f"cuda/lib64/libcudnn.so.{version}"])
        for version in ("8.0.5", "8.0.9")
    )
    before = tree(toolkit)
    archive.install(str(toolkit), "cudnn", str(old), digest(old))

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(archive, "delete_files", killed)
    with pytest.raises(KeyboardInterrupt):
        archive.install(str(toolkit), "cudnn", str(new), digest(new))
    monkeypatch.undo()
    if again:
        archive.install(str(toolkit), "cudnn", str(new), digest(new))
        names = sorted(path.name for path in (toolkit / "lib64").iterdir())
        assert names == ["libcudnn.so", "libcudnn.so.8.0.9"]
    assert archive.remove(str(toolkit), "cudnn")
    assert tree(toolkit) == before


def test_a_full_disk_leaves_the_toolkit_as_it_was(toolkit, tmp_path, monkeypatch):
    header, library, _ = LAYOUTS["cudnn-8.0.tgz"]
    src = make_tar(tmp_path / "cudnn.tgz", [header, library])
    before = tree(toolkit)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(archive.shutil, "copyfileobj", full)
    with pytest.raises(OSError, match="No space"):
        archive.install(str(toolkit), "cudnn", str(src), digest(src))
    assert tree(toolkit) == before


OUT = "cuda/include/../../../../etc/passwd"
THEIRS = ["cuda/lib64/libcudnn.so.8", "cuda/include/cuda.h"]  # the latter is there already


@pytest.mark.parametrize(
    ("names", "link"),
    [
        ([OUT], None),
        (["cuda/include/cudnn.h"], None),  # no library
        (THEIRS, None),
        (["cuda/include/cudnn.h", THEIRS[0]], "/etc/passwd"),
        (["cuda/include/cudnn.h", THEIRS[0]], "../../../etc/passwd"),
    ],
)
def test_archives_that_are_refused(toolkit, tmp_path, names, link):
    more = [member("cuda/lib64/libcudnn_x.so", tarfile.SYMTYPE, link)] if link else []
    src = make_tar(tmp_path / "x.tgz", names, more=more)
    before = tree(toolkit)
    with pytest.raises(archive.Refused):
        archive.install(str(toolkit), "cudnn", str(src), digest(src))
    assert tree(toolkit) == before
    assert archive.read_record(str(toolkit), "cudnn") == {"sha256": None, "files": []}
