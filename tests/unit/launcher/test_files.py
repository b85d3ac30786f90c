"""What is sent of a folder: each file is, or has a reason."""

import subprocess
from pathlib import Path

import pytest

from contract.errors import UserError
from launcher.plan import files


def write(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x = 1\n")


def git(folder, *words):
    who = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    more = ("-c", "protocol.file.allow=always")
    subprocess.run(["git", *who, *more, *words], cwd=folder, check=True, capture_output=True)


def commit(folder):
    git(folder, "add", "-f", ".")
    git(folder, "commit", "-qm", "begun")


def test_every_file_of_a_repository_is_sent_or_has_a_reason(tmp_path):
    """Those of a submodule and of a clone in it by their own rules."""
    other, root = tmp_path / "other", tmp_path / "project"
    for folder in (other, root):
        folder.mkdir()
        git(folder, "init", "-q")
    write(other, "net.py", ".marker")
    commit(other)
    write(root, ".project-root", "checkpoints/.gitkeep", "train.py", "keys/server.pem", "id_rsa")
    write(root, "id_map.py", ".github/workflows/a.yml", "__pycache__/old.pyc", "lib/pkg/a.py")
    links = {"pkg": "lib/pkg", "lib/pkg/train.py": "../../main.py", "lib/up": "..", "ids": "data"}
    for name, target in {**links, "out": "../other", "key.py": "id_rsa"}.items():
        (root / name).symlink_to(target)
    (root / ".gitignore").write_text("data/\n*.log\n")
    commit(root)
    git(root, "submodule", "add", "-q", str(other), "sub")
    write(root, "data/big.bin", "a.log", ".venv/lib/x.py", ".idea/a", "env/pyvenv.cfg", "env/b.py")
    write(root, "new.py", ".env", ".style", "sub/data/own.py", "sub/.env.local")
    git(root, "clone", "-q", str(other), "cloned")
    write(root, "cloned/a.log", "cloned/mine.txt")
    (root / "cloned/.gitignore").write_text("mine.txt\n")
    (root / "train.py").rename(root / "main.py")  # git still lists the old name
    found = files.list_files(root)
    mine = {".github/workflows/a.yml", ".gitignore", ".gitmodules", ".project-root", ".style"}
    mine |= {"checkpoints/.gitkeep", "id_map.py", "lib/pkg/a.py", "lib/pkg/train.py", "main.py"}
    mine |= {"new.py", "pkg/a.py", "pkg/train.py"}
    sub = {"sub/.marker", "sub/net.py", "sub/data/own.py"}
    cloned = {"cloned/.gitignore", "cloned/.marker", "cloned/net.py", "cloned/a.log"}
    assert {*found.sent} == mine | sub | cloned
    reasons = dict(found.unsent)
    assert {*reasons} == {
        *("data/", "a.log", "ids", "cloned/mine.txt", "keys/server.pem", "id_rsa", ".env"),
        *("sub/.env.local", "__pycache__/", "env/", ".venv/", ".idea/", "out", "key.py", "lib/up"),
    }
    assert found.reason_unsent("data/sub/x.csv") == reasons["data/"] == "ignored by git"
    assert found.reason_unsent("new.py") is None
    assert found.size == sum((root / name).stat().st_size for name in found.sent)


def test_a_folder_that_a_repository_above_ignores_is_sent_as_without_git(tmp_path):
    """As in a home whose own repository ignores all but a few dot files."""
    git(tmp_path, "init", "-q")
    write(tmp_path, "project/train.py", "project/deep/a.py")
    (tmp_path / ".gitignore").write_text("*\n")
    found = files.list_files(tmp_path / "project")
    assert (found.sent, found.unsent) == (("deep/a.py", "train.py"), ())


def test_without_git_all_is_sent_but_for_the_same_reasons(tmp_path):
    root = tmp_path / "project"
    write(root, "train.py", ".project-root", "a/b.py", ".cache/x", "__pycache__/x.pyc", ".env")
    write(root, "venv/pyvenv.cfg", "venv/lib/a.py", "cloned/a.py", "cloned/b.py")
    git(root / "cloned", "init", "-q")
    (root / "cloned/.gitignore").write_text("b.py\n")
    (root / "near").symlink_to("a")
    found = files.list_files(root)
    own = (".project-root", "a/b.py", "cloned/.gitignore", "cloned/a.py", "near/b.py", "train.py")
    assert found.sent == own
    unsent = {".cache/", ".env", "__pycache__/", "cloned/b.py", "venv/"}
    assert {name for name, _ in found.unsent} == unsent


@pytest.mark.parametrize("names", [("a", "b"), ("b", "a")])
def test_a_linked_folder_is_sent_with_what_its_own_links_lead_to(tmp_path, names):
    """Whichever of the two links has the first name."""
    outer, inner = names
    write(tmp_path, "c/deep.py", f"{inner}/own.py", f"{outer}/train.py")
    (tmp_path / outer / "l").symlink_to(f"../{inner}")
    (tmp_path / inner / "m").symlink_to("../c")
    found = files.list_files(tmp_path)
    assert {f"{outer}/l/own.py", f"{outer}/l/m/deep.py", f"{inner}/m/deep.py"} <= {*found.sent}
    assert found.unsent == ()


def test_what_is_not_sent_does_not_count_as_a_file_too_many(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_FILES", 5)
    write(tmp_path, *(f"__pycache__/{number}.pyc" for number in range(30)), "src/z.py")
    assert files.list_files(tmp_path).sent == ("src/z.py",)
    write(tmp_path, *(f"a/{number}.py" for number in range(30)))
    with pytest.raises(UserError, match="more than 5 files"):
        files.list_files(tmp_path)


def test_a_single_file_is_sent_once_and_has_no_reason_against_it(tmp_path):
    write(tmp_path, "a.py")
    found = files.list_files(tmp_path, ("a.py",))
    assert found.sent == ("a.py",) and found.unsent == ()


def test_a_home_and_more_than_a_gibibyte_are_not_sent(tmp_path, monkeypatch):
    write(tmp_path, "train.py", "a/b.py")
    for home in (tmp_path, tmp_path / "a"):
        monkeypatch.setenv("HOME", str(home))
        with pytest.raises(UserError, match="your home"):
            files.list_files(tmp_path)
    monkeypatch.setenv("HOME", "/root")
    assert files.list_files(Path(tmp_path)).sent == ("a/b.py", "train.py")
    with (tmp_path / "a/big.bin").open("wb") as file:
        file.truncate(files.MAX_BYTES)
    with pytest.raises(UserError, match=r"a has 1\.07 GB"):
        files.list_files(tmp_path)


def test_a_submodule_without_its_files_is_named(tmp_path):
    """As after a clone without --recurse-submodules."""
    other, root = tmp_path / "other", tmp_path / "project"
    for folder in (other, root):
        write(folder, "a.py")
        git(folder, "init", "-q")
        commit(folder)
    git(root, "submodule", "add", "-q", str(other), "sub")
    commit(root)
    git(tmp_path, "clone", "-q", str(root), "again")
    found = files.list_files(tmp_path / "again")
    assert found.sent == (".gitmodules", "a.py")
    assert found.reason_unsent("sub/a.py").startswith("submodules without their files")


def test_a_module_that_python_does_not_find_is_found_in_its_folder():
    names = ("src/own/net.py", "src/flat.py", "top.py", "config/yaml.yaml", "here/__init__.py")
    sent = files.Files(sent=names)
    modules = ("own", "flat", "top", "yaml", "here", "net")
    assert [sent.folder_of(name) for name in modules] == ["src", "src", None, None, None, "src/own"]
