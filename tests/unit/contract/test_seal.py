"""Who can make a seal that this user's RESUME takes for its own."""

import hmac
import json
import os

import pytest

from contract import seal

KNOWN = b"k" * seal.BYTES
FORGED = hmac.new(KNOWN, json.dumps("words").encode(), "sha256").hexdigest()


@pytest.fixture
def key(tmp_path, monkeypatch):
    """The key that somebody else knows, in a checkout that several users write to."""
    monkeypatch.setattr(seal, "KEYS", tmp_path)
    path = tmp_path / f"seal-{os.getuid()}"
    path.write_bytes(KNOWN)
    path.chmod(0o600)
    return path


@pytest.mark.parametrize("way", ["readable", "linked"])
def test_a_key_that_others_can_know_is_replaced(key, way):
    if way == "readable":
        key.chmod(0o644)
    else:
        key.symlink_to(key.rename(key.with_name("theirs")))
    assert not seal.holds("words", FORGED)
    assert seal.holds("words", seal.seal("words")) and not seal.holds("others", seal.seal("words"))


def test_another_user_s_key_makes_no_seal(key, monkeypatch):
    other = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: other)
    key.rename(key.with_name(f"seal-{other}"))
    assert not seal.holds("words", FORGED)
