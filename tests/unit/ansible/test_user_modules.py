"""Keys and folders of users: what the modules change (whom root follows: test_site_trust.py)."""

import os
import pwd

import pytest

from tests.unit.ansible.provision_machines import load

user_key, user_path = (load(f"ansible/library/{name}.py") for name in ("user_key", "user_path"))
users = load("ansible/module_utils/users.py")
KEY = "ssh-ed25519 AAAAkey control@lab"
NOT_YET = True  # check mode


@pytest.fixture
def keys(tmp_path):
    return tmp_path / "home/.ssh/authorized_keys"


def mode(path):
    return path.stat().st_mode & 0o777


def test_a_key_is_added_once_and_taken_away_alone(keys, tmp_path):
    (tmp_path / "home").mkdir()
    assert user_key.install(str(keys), KEY, NOT_YET) and not keys.exists()
    assert user_key.install(str(keys), KEY, False)
    assert not user_key.install(str(keys), "ssh-ed25519 AAAAkey another comment", False)
    assert (mode(keys.parent), mode(keys)) == (0o700, 0o600)
    own = 'from="10.0.0.0/8",command="/bin/x a b" ssh-rsa AAAAtheirs x\n# ssh-ed25519 AAAAkey'
    dotfile = tmp_path / "dotfile"
    dotfile.write_text(own)  # without a last newline
    keys.unlink()
    keys.symlink_to(dotfile)
    assert user_key.install(str(keys), KEY, False)
    assert dotfile.read_text() == f"{own}\n{KEY}\n"
    assert [user_key.remove(str(keys), KEY, False) for _ in range(2)] == [True, False]
    assert dotfile.read_text() == f"{own}\n" and keys.is_symlink()


def test_what_is_no_file_makes_nobody_wait(keys):
    keys.parent.mkdir(parents=True)
    os.mkfifo(keys)
    with pytest.raises(OSError, match="not a regular file"):
        user_key.install(str(keys), KEY, False)


def test_where_others_may_write_is_closed_or_named(keys, tmp_path):
    keys.parent.mkdir(parents=True)
    for path in (tmp_path / "home", keys.parent):
        path.chmod(0o775)
    assert user_key.close(str(tmp_path / "home"), str(keys), False) == [str(tmp_path / "home")]
    assert mode(keys.parent) == 0o755


def test_root_goes_as_far_as_it_alone_decides(tmp_path, monkeypatch):
    """Through its own links, and no further than a folder that others may change."""
    theirs = tmp_path / "disk/anna"
    theirs.mkdir(parents=True)
    (tmp_path / "link").symlink_to("disk/../disk")
    (theirs / "data").symlink_to("/etc")
    monkeypatch.setattr(users, "is_roots_alone", lambda folder: folder != str(theirs))
    assert users.split_at_root(f"{tmp_path}/link/anna/data/x") == (str(theirs), "data/x")
    assert users.split_at_root(f"{tmp_path}/link/new/x") == (f"{tmp_path}/disk", "new/x")
    (tmp_path / "round").symlink_to("round")
    with pytest.raises(OSError, match="too many levels"):
        users.split_at_root(f"{tmp_path}/round")


def test_a_folder_or_a_link_is_made_once_and_nothing_else_goes(tmp_path):
    me, path = pwd.getpwuid(os.getuid()), str(tmp_path / "new/data")
    made = [user_path.make_folder(path, me, check) for check in (NOT_YET, False, False)]
    assert made == [True, True, False]
    (tmp_path / "new/data/file").touch()
    assert not user_path.remove(path, None, False)
    link = tmp_path / "link"
    made = [user_path.make_link(str(link), source, False) for source in ("a", "a", "b")]
    assert made == [True, False, True] and str(link.readlink()) == "b"
    assert user_path.remove(str(link), None, False) and not link.is_symlink()
