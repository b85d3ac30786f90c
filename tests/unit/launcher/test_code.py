"""What is recorded is what ran: one copy of the code, hashed and sent."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from contract import git
from contract.errors import UserError
from launcher.machines.local import LocalNode
from launcher.plan import code, files
from launcher.watch import guards
from tests.unit.launcher.launcher_values import host

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A repository with a trainer; the code as it is first looked at."""
    root = tmp_path / "checkout"
    (root / "trainer").mkdir(parents=True)
    (root / "trainer/loop.py").write_text("rate = 0.1\n")
    for argv in (["init", "-q"], ["add", "."], ["commit", "-qm", "begun"]):
        names = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        subprocess.run(["git", *names, *argv], cwd=root, check=True)
    monkeypatch.setattr(code, "CHECKOUT", root)
    monkeypatch.setattr(files, "CHECKOUT", root)
    code.take_snapshot.cache_clear()
    yield root
    code.take_snapshot.cache_clear()


@pytest.fixture
def target(tmp_path):
    return host(1, connection="local", address="127.0.0.1", env_python="/usr/bin/python3"), str(
        tmp_path / "node1/code"
    )


def send(target):
    one, folder = target
    code.send(code.take_snapshot(), {one.name: LocalNode(one)}, {one.name: folder})
    return Path(folder)


def test_each_version_stays_beside_others_and_of_two_that_send_one_the_first_stays(
    checkout, tmp_path
):
    """A run may start from it, or train, while another's is sent."""

    def send_anew():
        code.take_snapshot.cache_clear()
        now = code.take_snapshot()
        return now, send((one, str(tmp_path / "node1" / now.folder)))

    one = host(1, connection="local", address="127.0.0.1", env_python="/usr/bin/python3")
    recorded, first = send_anew()
    before = first.stat().st_ino
    assert send_anew()[1] == first and first.stat().st_ino == before
    (checkout / "trainer/loop.py").write_text("rate = 0.2\n")
    changed, second = send_anew()
    for now, folder in ((recorded, first), (changed, second)):
        assert code.tree_sha256(folder) == now.sha256
    assert sorted(first.parent.iterdir()) == sorted([first, second])


def test_what_is_changed_after_the_first_look_does_not_run(checkout, target):
    (checkout / "trainer/loop.py").write_text("rate = 0.2\n")
    (checkout / "trainer/loop.py").chmod(0o444)
    recorded = code.take_snapshot()
    assert (recorded.tree / "trainer/loop.py").stat().st_mode & 0o200  # to be copied again
    (checkout / "trainer/loop.py").chmod(0o644)
    assert "+rate = 0.2" in recorded.git_diff
    (checkout / "trainer/loop.py").write_text("rate = 99\n")  # while it waits in a queue
    (checkout / "trainer/new.py").write_text("")
    sent = send(target)
    assert (sent / "trainer/loop.py").read_text() == "rate = 0.2\n"
    assert code.tree_sha256(sent, list(recorded.names)) == recorded.sha256
    assert not (sent / "trainer/new.py").exists()


def test_secrets_links_and_odd_names_stay_here(checkout, target, tmp_path):
    (tmp_path / "id_ed25519").write_text("secret\n")
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys/more.py").write_text("secret\n")
    examples = checkout / "examples"
    (examples / ".ssh").mkdir(parents=True)
    (examples / ".ssh/key").write_text("secret\n")
    (examples / ".env").write_text("TOKEN=secret\n")
    (examples / "linked.py").symlink_to(tmp_path / "id_ed25519")
    (examples / "folder").symlink_to(tmp_path / "keys")
    (examples / os.fsdecode(b"caf\xe9.py")).write_text("")
    (examples / "model.py").write_bytes(b"name = 'caf\xe9'\n")
    (checkout / "trainer/loop.py").write_bytes(b"name = 'caf\xe9'\n")  # in the diff, too
    assert code.take_snapshot().names == ("examples/model.py", "trainer/loop.py")
    sent = send(target)
    assert {path.name for path in sent.rglob("*") if path.is_file()} == {"model.py", "loop.py"}
    assert "secret" not in code.take_snapshot().git_diff
    shutil.rmtree(checkout / ".git")  # an unpacked archive has the same rule
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)  # wherever that was
    (tmp_path / ".gitignore").write_text("checkout\n")
    code.take_snapshot.cache_clear()
    assert code.take_snapshot().names == ("examples/model.py", "trainer/loop.py")


def test_what_a_machine_holds_is_compared(checkout, target):
    one, folder = target
    sent = send(target)
    nodes, folders = {one.name: LocalNode(one)}, {one.name: folder}
    guards.check_code(code.take_snapshot().sha256, [one], nodes, folders)
    (sent / "trainer/loop.py").write_text("rate = 3\n")
    with pytest.raises(UserError, match=r"node1: .*differs from what was sent"):
        guards.check_code(code.take_snapshot().sha256, [one], nodes, folders)


def test_a_mount_without_exec_makes_no_other_code(checkout, monkeypatch):
    """As that of TMPDIR, or of a machine's node_dir: access(2) says no there, whatever the mode."""
    (checkout / "trainer/loop.py").chmod(0o755)
    access = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode: mode != os.X_OK or checkout in Path(path).parents
    )
    assert access(checkout / "trainer/loop.py", os.X_OK)
    assert code.take_snapshot().names == ("trainer/loop.py",)


def test_files_that_change_while_they_are_copied_are_told(checkout, monkeypatch):
    copy = shutil.copy2

    def meanwhile(source, target):
        copy(source, target)
        with source.open("a") as file:
            file.write("#\n")

    monkeypatch.setattr(shutil, "copy2", meanwhile)
    with pytest.raises(UserError, match="change while Tandem copies them"):
        code.take_snapshot()


@pytest.fixture
def mine(tmp_path):
    """A folder with a model of one's own, outside the checkout."""
    folder = tmp_path / "mine"
    (folder / "parts/.cache").mkdir(parents=True)
    (folder / "__pycache__").mkdir()
    for name in ("net.py", "parts/blocks.py", ".env", "parts/.cache/x", "__pycache__/net.pyc"):
        (folder / name).write_text("depth = 1\n")
    (folder / "keys.py").symlink_to(tmp_path / "id_ed25519")
    return folder


def test_the_folder_of_one_s_own_model_goes_along_by_the_same_rules(checkout, target, mine):
    alone = code.take_snapshot()
    now = code.take_snapshot(mine)
    names = [name for name in now.names if not name.startswith("library/tandem/")]
    assert names == ["trainer/loop.py", "own/net.py", "own/parts/blocks.py"]
    assert {"library/tandem/sync/attach.py", "library/tandem/contract/errors.py"} < {*now.names}
    assert now.sha256 != alone.sha256
    one, folder = target
    code.send(now, {one.name: LocalNode(one)}, {one.name: folder})
    sent = Path(folder)
    there = {str(path.relative_to(sent)) for path in sent.rglob("*") if path.is_file()}
    assert there == set(now.names)
    guards.check_code(now.sha256, [one], {one.name: LocalNode(one)}, {one.name: folder})
    subprocess.run(["git", "init", "-q"], cwd=mine, check=True)
    (mine / ".gitignore").write_text("parts/\n")
    code.take_snapshot.cache_clear()
    assert code.take_snapshot(mine).files.sent == (".gitignore", "net.py")


def test_a_folder_that_holds_more_than_a_model_is_not_sent(checkout, mine, monkeypatch):
    """Whoever names a file in the home folder does not mean to send all of it."""
    monkeypatch.setattr(files, "MAX_FILES", 3)
    for number in range(3):
        (mine / f"{number}.txt").write_text("")
    with pytest.raises(UserError, match="or give a folder that has only the code"):
        code.take_snapshot(mine)


@pytest.fixture
def repository(mine, monkeypatch):
    """The folder as a repository that ignores a key, within another that ignores nothing."""
    for name in ("GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM"):
        monkeypatch.setenv(name, os.devnull)
    for folder in (mine.parent, mine):
        subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    (mine / ".gitignore").write_text("key.txt\n")
    (mine / "key.txt").write_text("secret\n")
    return mine


def belongs_to_somebody_else(_git, monkeypatch):
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")  # git's own tests have this
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)  # the user's may trust all folders


def is_damaged(git, _monkeypatch):
    (git / "HEAD").unlink()


def has_no_git_beside_it(_git, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")


REFUSED = [
    belongs_to_somebody_else,
    is_damaged,
    has_no_git_beside_it,
]


@pytest.mark.parametrize("spoil", REFUSED, ids=[spoil.__name__ for spoil in REFUSED])
def test_nothing_is_sent_of_a_repository_that_git_does_not_list(
    repository, checkout, monkeypatch, spoil
):
    """Without git's word, a key that it ignores is a file like any other."""
    assert "own/key.txt" not in code.take_snapshot(repository).names
    code.take_snapshot.cache_clear()
    spoil(repository / ".git", monkeypatch)
    monkeypatch.setattr(code.shutil, "copy2", lambda *_: pytest.fail("a file was read"))
    with pytest.raises(UserError) as refused:
        code.take_snapshot(repository)
    if spoil is belongs_to_somebody_else:
        assert f"git config --global --add safe.directory {repository}" in str(refused.value)


def test_of_tandem_s_own_checkout_only_the_revision_is_lost(checkout, monkeypatch):
    whole = code.take_snapshot()
    assert whole.git_revision
    for spoil in (belongs_to_somebody_else, has_no_git_beside_it):
        code.take_snapshot.cache_clear()
        spoil(checkout / ".git", monkeypatch)
        now = code.take_snapshot()
        assert (now.names, now.git_revision) == (whole.names, None)


def test_no_program_that_a_repository_names_is_run(checkout, repository, tmp_path):
    """Somebody else's folder is looked at, and copies of Tandem are handed on."""
    ran = tmp_path / "ran"
    program = tmp_path / "program"
    program.write_text(f'#!/bin/sh\necho "$0 $*" >> {ran}\ncat\n')
    program.chmod(0o755)
    (checkout / ".gitattributes").write_text("*.py filter=x diff=x\n")
    (repository / ".gitattributes").write_text("*.py filter=x diff=x\n")
    keys = ("core.fsmonitor", "diff.external", "diff.x.textconv", "diff.x.command", "core.pager")
    keys += ("filter.x.clean", "filter.x.process", "core.sshCommand", "core.alternateRefsCommand")
    for folder in (checkout, repository):
        subprocess.run(["git", "add", "."], cwd=folder, check=True)
        for key in keys:
            subprocess.run(["git", "config", key, str(program)], cwd=folder, check=True)
        subprocess.run(["git", "config", "filter.x.required", "true"], cwd=folder, check=True)
        for hook in ("post-index-change", "fsmonitor-watchman", "reference-transaction"):
            shutil.copy(program, folder / ".git/hooks" / hook)
    (checkout / "trainer/loop.py").write_text("rate = 0.2\n")
    now = code.take_snapshot(repository)
    assert not ran.exists(), ran.read_text()
    assert "own/net.py" in now.names and "+rate = 0.2" in now.git_diff
    subprocess.run(["git", "config", "filter.a=b.clean", str(program)], cwd=checkout, check=True)
    (checkout / ".gitattributes").write_text("*.py filter=a=b\n")
    code.take_snapshot.cache_clear()
    code.take_snapshot(repository)
    assert not ran.exists(), ran.read_text()


@pytest.mark.parametrize("place", [".gitignore", "net/named"])
def test_a_named_pipe_that_git_waits_for_is_named(repository, monkeypatch, place):
    monkeypatch.setattr(git, "IDLE_SECONDS", 0.2)
    (repository / "net").mkdir()
    subprocess.run(
        ["git", "config", "include.path", str(repository / "net/named")], cwd=repository, check=True
    )
    (repository / place).unlink(missing_ok=True)
    os.mkfifo(repository / place)
    with pytest.raises(UserError, match=f"named pipe {repository / place}"):
        code.take_snapshot(repository)


def test_a_repository_lists_no_other_folder(repository, tmp_path):
    """By core.worktree the rules and names of a home were read in its place."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home/net.txt").touch()
    words = ["git", "config", "core.worktree", str(tmp_path / "home")]
    subprocess.run(words, cwd=repository, check=True)
    assert "net.py" in files.list_files(repository).sent


def test_patterns_and_files_without_end_are_an_error(repository, monkeypatch):
    monkeypatch.setattr(git, "CPU_SECONDS", 1)
    monkeypatch.setattr(git, "MEMORY_KIB", 256 << 10)
    with (repository / ".gitignore").open("r+b") as file:
        file.truncate(512 << 20)
    with pytest.raises(UserError, match=r"git prints: .*memory"):
        code.take_snapshot(repository)
    (repository / ".gitignore").write_text("**/a/" * 12 + "b\n")
    (repository / ("a/" * 40)).mkdir(parents=True)
    (repository / ("a/" * 40) / "c").touch()
    with pytest.raises(UserError, match="computed for 1 s"):
        code.take_snapshot(repository)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_leaves_no_copies(repository, tmp_path, number):
    (repository / ".git/HEAD").unlink()
    os.mkfifo(repository / ".git/HEAD")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    argv = [sys.executable, "-m", "launcher", "dry-run", f"SCRIPT={repository / 'net.py'}"]
    options = {"env": {**os.environ, "TMPDIR": str(scratch)}, "stderr": subprocess.PIPE}
    # Whoever started these tests may ignore the signal, as nohup does, and children inherit that.
    options["preexec_fn"] = lambda: signal.signal(number, signal.SIG_DFL)
    with (
        subprocess.Popen(argv, cwd=ROOT, **options) as process,
        (repository / ".git/HEAD").open("wb", buffering=0),  # as soon as git waits
    ):
        assert [*scratch.iterdir()]
        process.send_signal(number)
        assert process.wait() == 128 + number
    assert [*scratch.iterdir()] == []


def test_links_that_lead_to_one_another_and_deep_folders_are_cut_off(checkout, mine, monkeypatch):
    """Thirty folders with two links each stand for a thousand million files."""
    (mine / ("a/" * 150)).mkdir(parents=True)
    assert files.TOO_DEEP in [why for _, why in files.list_files(mine).unsent]
    calls = []
    is_in = files._is_in
    monkeypatch.setattr(files, "_is_in", lambda *words: calls.append(words) or is_in(*words))
    for number in range(100):
        (mine / f"{number}").touch()
        (mine / f"link{number}").symlink_to(f"{number}")
    assert len(files.list_files(mine).sent) > 200 and len(calls) < 1000
    for number in range(30):
        (mine / f"d{number:02}").mkdir()
        (mine / f"d{number:02}/file").touch()
        for link in "ab" if number else "":
            (mine / f"d{number:02}" / link).symlink_to(f"../d{number - 1:02}")
    with pytest.raises(UserError, match="50000 files"):
        files.list_files(mine)
