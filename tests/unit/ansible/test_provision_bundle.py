"""The bundle's plan, its locks and its manifest; a stand-in for pip writes what is asked for."""

import hashlib

import pytest

from tests.unit.ansible.provision_machines import load

bundle = load("ansible/bundle.py")


def order(tmp_path, contents):
    other = f"--hash=sha256:{'0' * 64}"
    lines = [
        f"{name}==1.0 \
    --hash=sha256:{hashlib.sha256(text).hexdigest()} \
    {other}"
        for name, text in contents.items()
    ]
    lock = tmp_path / "lock.txt"
    lock.write_text("\n".join(lines) + "\n")
    return bundle.Plan(lock, "3.11", "2.28", tmp_path / "wheels", "https://index.invalid/simple")


def test_plan_follows_the_table(tmp_path):
    made = bundle.plan("cu102", "", "https://index.invalid/simple", tmp_path)
    assert (made.python, made.glibc) == ("3.9", "2.17")
    assert made.folder == tmp_path / "wheels/cu102-py3.9"
    with pytest.raises(bundle.BundleError, match=r"no lock for Python 2\.7"):
        bundle.plan("cpu", "2.7", "", tmp_path)
    with pytest.raises(bundle.BundleError, match="'cu1' is not in"):
        bundle.plan("cu1", "", "", tmp_path)


def test_platforms_stop_at_the_c_library():
    tags = bundle.platforms("2.17")
    assert tags[0] == "manylinux_2_17_x86_64" and "manylinux_2_18_x86_64" not in tags
    assert "manylinux2014_x86_64" in tags
    assert "manylinux2014_x86_64" not in bundle.platforms("2.12")


def test_gathering_is_resumed_and_completed_once(tmp_path, monkeypatch):
    contents = {"a": b"wheel a", "b": b"wheel b"}
    plan = order(tmp_path, contents)
    fetched = []

    def fetch(requirement, _):
        fetched.append(requirement.name)
        (plan.folder / f"{requirement.name}-1.0-py3-none-any.whl").write_bytes(
            contents[requirement.name]
        )

    monkeypatch.setattr(bundle, "fetch", fetch)
    plan.folder.mkdir()
    (plan.folder / "a-1.0-py3-none-any.whl").write_bytes(b"wheel a")
    (plan.folder / "old-0.1-py3-none-any.whl").write_bytes(b"of an older lock")
    assert not bundle.is_complete(plan)
    bundle.gather(plan, say=lambda line: None)
    assert fetched == ["b"]
    assert bundle.is_complete(plan)
    assert sorted(path.name[0] for path in plan.folder.glob("*.whl")) == ["a", "b"]


def test_a_broken_wheel_is_fetched_again_and_another_lock_is_not_complete(tmp_path, monkeypatch):
    plan = order(tmp_path, {"a": b"wheel a"})
    plan.folder.mkdir()
    wheel = plan.folder / "a-1.0-py3-none-any.whl"
    wheel.write_bytes(b"half")
    monkeypatch.setattr(bundle, "fetch", lambda *_: wheel.write_bytes(b"wheel a"))
    bundle.gather(plan, say=lambda line: None)
    assert wheel.read_bytes() == b"wheel a" and bundle.is_complete(plan)
    plan.lock.write_text(plan.lock.read_text() + "# newer\n")
    assert not bundle.is_complete(plan)
