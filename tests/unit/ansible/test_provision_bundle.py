"""The bundle's wheels (by a stand-in for pip), installers, manifest and command line."""

import hashlib
import json
import os
import subprocess
import tarfile

import pytest

from contract.errors import UserError
from tests.unit.ansible.provision_machines import load

bundle = load("ansible/bundle.py")
installers, manifest, wheels = bundle.installers, bundle.manifest, bundle.wheels
Progress = bundle.fetch.Progress

WANTED = {"wheels": [], "releases": {}, "stacks": [], "index_url": "", "mirrors": {}, "conda": []}
PAGE = "https://vendor.invalid/login"


def order(tmp_path, contents):
    other = f"--hash=sha256:{'0' * 64}"
    lock = tmp_path / "lock.txt"
    lock.write_text(
        "".join(
            f"{name}==1.0 --hash=sha256:{hashlib.sha256(text).hexdigest()} {other}\n"
            for name, text in contents.items()
        )
    )
    return wheels.Wheels(lock, "3.11", "2.28", tmp_path / "wheels", "https://index.invalid/simple")


def complete(plan):
    return manifest.is_complete(plan.folder, plan.purpose())


def test_plan_follows_the_table(tmp_path):
    made = wheels.plan("cu102", "", "https://index.invalid/simple", tmp_path)
    assert (made.python, made.glibc) == ("3.10", "2.17")
    assert made.folder == tmp_path / "wheels/cu102-py3.10"
    for wrong in (("cpu", "2.7", ""), ("cu1", "", "")):
        with pytest.raises(UserError):
            wheels.plan(*wrong, tmp_path)
    with pytest.raises(UserError):
        installers.plan("cu1", {}, tmp_path)
    # A folder that was asked for twice is gathered once.
    wanted = {**WANTED, "wheels": [["cpu", ""], ["cpu", "3.11"], ["cpu", "3.12"]]}
    names = [made.folder.name for made in bundle.plan(wanted, tmp_path)]
    assert names == ["cpu-py3.11", "cpu-py3.12"]


def test_platforms_stop_at_the_c_library():
    tags = wheels.platforms("2.17")
    assert tags[0] == "manylinux_2_17_x86_64" and "manylinux_2_18_x86_64" not in tags
    assert "manylinux2014_x86_64" in tags
    assert "manylinux2014_x86_64" not in wheels.platforms("2.12")


def test_gathering_is_resumed_and_completed_once(tmp_path, monkeypatch, capsys):
    contents = {"a": b"wheel a", "b": b"wheel b"}
    plan = order(tmp_path, contents)
    fetched = []

    def fetch(requirement, _):
        fetched.append(requirement.name)
        (plan.folder / f"{requirement.name}-1.0-py3-none-any.whl").write_bytes(
            contents[requirement.name]
        )

    monkeypatch.setattr(wheels, "fetch", fetch)
    plan.folder.mkdir()
    (plan.folder / "a-1.0-py3-none-any.whl").write_bytes(b"wheel a")
    (plan.folder / "old-0.1-py3-none-any.whl").write_bytes(b"of an older lock")
    assert not complete(plan)
    assert bundle.gather([plan], Progress())
    assert fetched == ["b"]
    assert capsys.readouterr().out == "wheels: 2/2 b 1.0\n"
    assert complete(plan)
    assert sorted(path.name[0] for path in plan.folder.glob("*.whl")) == ["a", "b"]
    assert not bundle.gather([plan], Progress())


def test_a_broken_wheel_is_fetched_again_and_another_lock_is_not_complete(tmp_path, monkeypatch):
    plan = order(tmp_path, {"a": b"wheel a"})
    plan.folder.mkdir()
    wheel = plan.folder / "a-1.0-py3-none-any.whl"
    wheel.write_bytes(b"half")
    monkeypatch.setattr(wheels, "fetch", lambda *_: wheel.write_bytes(b"wheel a"))
    wheels.gather(plan, Progress())
    assert wheel.read_bytes() == b"wheel a" and complete(plan)
    plan.lock.write_text(plan.lock.read_text() + "# newer\n")
    assert not complete(plan)


def folder_with(tmp_path, **contents):
    for name, text in contents.items():
        (tmp_path / name).write_bytes(text)
    digests = {name: hashlib.sha256(text).hexdigest() for name, text in contents.items()}
    manifest.write(tmp_path, "test", digests)
    return tmp_path


def test_every_missing_or_broken_file_is_named_at_once(tmp_path):
    folder = folder_with(tmp_path, a=b"aaa", b=b"bbb", c=b"ccc")
    assert manifest.problems(folder, "test") == []
    (folder / "a").write_bytes(b"aab")
    os.utime(folder / "a", ns=(0, 0))  # a failing disk changes no modification time
    (folder / "b").unlink()
    broken, missing = manifest.problems(folder, "test")
    assert f"{folder}/a is broken" in broken and f"{folder}/b is missing" in missing
    assert manifest.problems(folder, "other") and manifest.problems(folder / "none", "test")


def test_a_file_that_was_written_since_is_read(tmp_path):
    folder = folder_with(tmp_path, a=b"aaa")
    assert manifest.is_complete(folder, "test")
    later = (folder / manifest.NAME).stat().st_mtime_ns + 1
    os.utime(folder / "a", ns=(later, later))  # a copy of the bundle, for example
    assert manifest.is_complete(folder, "test")
    (folder / "a").write_bytes(b"aab")
    os.utime(folder / "a", ns=(later, later))
    assert not manifest.is_complete(folder, "test")


def table(**row):
    parts = [{"file": "cudnn.tgz", "url": None, "page": PAGE, "sha256": None},
             {"file": "nccl.txz", "url": None, "page": PAGE, "sha256": "6" * 64}]  # fmt: skip
    driver = {"version": "580.1", "url": "https://vendor.invalid/580.run", "sha256": "5" * 64}
    row = {"driver": "440.33", "toolkit": "10.2", "toolkit_default": True, **row}
    return {"rows": {"cu": row}, "drivers": [driver], "toolkits": {"10.2": parts}}


def by_hand(tmp_path):
    wanted = {"toolkit": "true", "apex": "auto", "driver_version": "auto"}
    return installers.plan("cu", wanted, tmp_path, table(driver=None))[0]


def test_installers_follow_the_settings(tmp_path):
    def names(toolkit, version="auto", **row):
        wanted = {"toolkit": toolkit, "apex": "auto", "driver_version": version}
        return [made.folder.name for made in installers.plan("cu", wanted, tmp_path, table(**row))]

    assert names("auto") == ["cu", "toolkit-10.2"]
    assert names("auto", toolkit_default=False) == names("false") == ["cu"]
    assert names("false", version="580.1") == ["cu"]
    with pytest.raises(UserError):
        names("auto", driver="590.1")
    with pytest.raises(UserError):
        names("false", version="470.1")


def test_files_behind_a_login_are_named_with_page_name_and_folder(tmp_path):
    plan = by_hand(tmp_path)
    with pytest.raises(UserError) as refused:
        installers.gather(plan, Progress())
    assert str(refused.value).splitlines() == [
        f"you must download {name} yourself: get it from {PAGE} and put it into {plan.folder}"
        for name in ("cudnn.tgz", "nccl.txz")
    ]
    (plan.folder / "cudnn.tgz").write_bytes(b"cudnn")
    (plan.folder / "nccl.txz").write_bytes(b"an error page")
    with pytest.raises(UserError, match=r"nccl\.txz is not the expected file"):
        installers.gather(plan, Progress())


def test_a_file_that_nobody_vouches_for_is_named_as_it_is_first_used(tmp_path, capsys):
    """Where a bar moves as well; later uses are of a known sum."""
    progress = Progress()
    progress.is_terminal = True
    (tmp_path / "Miniforge.sh").write_bytes(b"first")
    made = installers.plan_conda((tmp_path / "Miniforge.sh").as_uri(), "", tmp_path)
    installers.gather(made, progress)
    sentence = f"second source: {hashlib.sha256(b'first').hexdigest()}"
    assert sentence in capsys.readouterr().out and sentence in progress.trusted[0]
    installers.gather(made, progress)
    assert len(progress.trusted) == 1 and "second source" not in capsys.readouterr().out
    assert (made.folder / "Miniforge.sh").read_bytes() == b"first" and complete(made)
    (made.folder / "Miniforge.sh").unlink()
    (tmp_path / "Miniforge.sh").write_bytes(b"second")
    with pytest.raises(UserError, match="its SHA-256 differs"):
        installers.gather(made, progress)


def test_verify_prints_what_is_wrong_and_a_bad_order_is_a_sentence(tmp_path, capsys, monkeypatch):
    wanted = {**WANTED, "wheels": [["cpu", "3.11"]]}
    monkeypatch.setattr(bundle, "BUNDLE", tmp_path)
    assert bundle.main(["--verify", json.dumps(wanted)]) == 1
    assert "wheels/cpu-py3.11 is missing or was not completed" in capsys.readouterr().out
    assert bundle.main([json.dumps({**wanted, "releases": {"etch": []}})]) == 2
    assert "tandem: release 'etch' is not in ansible/releases.yml" in capsys.readouterr().err


@pytest.fixture
def source(tmp_path):
    """(path of a repository, its older commit)."""
    path = tmp_path / "source"
    path.mkdir()
    (path / "setup.py").write_text("first\n")
    author = ["-c", "user.name=x", "-c", "user.email=x@localhost", "-c", "commit.gpgsign=false"]
    for words in (["init", "-q"], ["config", "uploadpack.allowAnySHA1InWant", "true"],
                  ["add", "."], [*author, "commit", "-qm", "first"]):  # fmt: skip
        subprocess.run(["git", *words], cwd=path, check=True)
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=path, capture_output=True, text=True)
    (path / "setup.py").write_text("second\n")
    subprocess.run(["git", *author, "commit", "-qam", "second"], cwd=path, check=True)
    return path, done.stdout.strip()


def test_the_files_of_the_commit_are_packed_and_none_of_a_later_one(source, tmp_path):
    path, commit = source
    installers.pack_commit(f"file://{path}", commit, tmp_path / "apex-1.tar.gz")
    with tarfile.open(tmp_path / "apex-1.tar.gz") as archive:
        assert archive.getnames() == ["apex-1", "apex-1/setup.py"]
        assert archive.extractfile("apex-1/setup.py").read() == b"first\n"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["apex-1.tar.gz", "source"]
    with pytest.raises(UserError, match="git fetch of 0000"):  # and of another one nothing
        installers.pack_commit(f"file://{path}", "0" * 39 + "1", tmp_path / "apex-2.tar.gz")
    assert not (tmp_path / "apex-2.tar.gz").exists()
