"""The tiers of tests: which file is in which, and a broken-off `make test-all` that goes on."""

import os
import subprocess

import pytest

from tools import all_tests
from tools.all_tests import ROOT, Piece

SCRIPT = (ROOT / "tools/test.sh").read_text()


def test_every_file_of_tests_is_in_a_tier(monkeypatch):
    monkeypatch.setattr(all_tests, "collect_files", lambda *words: [])
    words = {*SCRIPT.split(), *(word for piece in all_tests.list_pieces() for word in piece.argv)}
    files = [path for room in ("tests", "bench") for path in (ROOT / room).rglob("test_*.py")]
    assert len(files) > 200
    assert [p for p in files if not any((ROOT / word) in (p, *p.parents) for word in words)] == []
    names = next(line for line in SCRIPT.splitlines() if line.startswith("for name in site_"))
    named = names.removeprefix("for name in ").removesuffix("; do").split()
    assert all((ROOT / f"tests/lab/test_{name}.py").exists() for name in [*named, "legacy", "site"])


def test_what_passed_is_left_out_until_asked_again(monkeypatch, tmp_path):
    monkeypatch.setattr(all_tests, "RESULTS", tmp_path)
    count = tmp_path / "count"
    first = Piece("first", ("sh", "-c", f"echo x >>{count}"))
    assert all_tests.run_pieces([first, Piece("second", ("false",))], again=False) == 1
    assert all_tests.run_pieces([first, Piece("second", ("true",))], again=False) == 0
    assert count.read_text() == "x\n"
    all_tests.run_pieces([first], again=True)
    assert count.read_text() == "x\nx\n"


STUBS = {  # of what `make test` calls: each says how it was called
    "python": 'echo "python $*" | grep -v digits >>"$CALLS"\n'
    'case "$*" in *$FAILS*) exit 3 ;; esac\n',
    "df": "printf 'Avail\\n%sG\\n' \"$FREE\"\n",
    "venv.sh": "",
    "apt.sh": "",
    "cores.sh": 'echo cores >>"$CALLS"\n',
    "lint.sh": 'echo "lint $ONLY$MAKEFLAGS$PYTHONDONTWRITEBYTECODE" >>"$CALLS"\n',
}


@pytest.fixture
def called(tmp_path, monkeypatch):
    """called(tier, words, FAILS=...): how it ended, and what it called."""
    for name, text in STUBS.items():
        path = tmp_path / (".venv/bin" if name in ("python", "df") else "tools") / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}")
        path.chmod(0o755)
    (tmp_path / "tools/test.sh").write_text(SCRIPT)
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    for name in ("id",):  # root
        path = tmp_path / ".venv/bin" / name
        path.write_text("#!/bin/sh\necho 0\n")
        path.chmod(0o755)

    def call(*argv, **words):
        env = {"PATH": os.environ["PATH"], "CALLS": f"{tmp_path}/calls", "FAILS": "nothing"}
        env["FREE"] = "50"
        env |= {"MAKEFLAGS": " -- ONLY=lab", "PYTHONDONTWRITEBYTECODE": "1", **words}
        argv = ["sh", str(tmp_path / "tools/test.sh"), *argv]
        done = subprocess.run(argv, env=env, capture_output=True, text=True)
        calls = tmp_path / "calls"
        return done, calls.read_text().splitlines() if calls.exists() else []

    return call


def test_a_tier_ends_with_the_first_command_that_fails(called):
    done, calls = called("test")
    assert done.returncode == 0, done.stderr
    assert [words.split()[-1] for words in calls if "pytest" in words][-1] == "tests/messages"
    assert "lint " in calls  # without the words of this make
    done, calls = called("test", FAILS="tests/gpu")
    assert done.returncode == 3
    assert not [words for words in calls[4:] if "tests/unit" in words]


@pytest.mark.parametrize(("free", "count"), [("50", 1), ("20", 2)])
def test_the_lab_has_every_file_once(called, free, count):
    """Where the disk has less room, in two calls: the second is the whole folder but for those."""
    done, calls = called("test-lab", FREE=free)
    assert done.returncode == 0, done.stderr
    assert calls[0] == "cores"
    assert len(calls) == 1 + count
    words = " ".join(calls).split()
    for path in (ROOT / "tests/lab").glob("test_*.py"):
        name = f"tests/lab/{path.name}"
        listed = words.count(name)
        assert listed == 1 if count == 1 else listed == words.count(f"--ignore={name}"), name
    assert words.count("tests/lab") == count - 1
