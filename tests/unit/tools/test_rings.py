"""The rings of tests: which file is in which, and a broken-off `make test-all` that goes on."""

import pytest

from tools import rings
from tools.rings import ROOT, Part


@pytest.fixture
def as_root(monkeypatch, tmp_path):
    monkeypatch.setattr(rings.os, "geteuid", lambda: 0)
    monkeypatch.setattr(rings, "RESULTS", tmp_path)


def test_every_file_of_tests_is_in_a_ring(as_root, monkeypatch):
    monkeypatch.setattr(rings, "run", lambda part: 0)
    monkeypatch.setattr(rings, "collect", lambda *words: [])
    parts = [part for ring in rings.RINGS.values() for part in ring("")]
    parts += [part.beside for part in parts if part.beside]
    words = {word for part in parts for word in part.argv}
    files = [path for room in ("tests", "bench") for path in (ROOT / room).rglob("test_*.py")]
    assert len(files) > 200
    assert [p for p in files if not any((ROOT / word) in (p, *p.parents) for word in words)] == []


def test_what_passed_is_left_out_until_asked_again(as_root, tmp_path):
    count = tmp_path / "count"
    first = Part("first", ("sh", "-c", f"echo x >>{count}"))
    assert rings.run_pieces([first, Part("second", ("false",))], again=False) == 1
    assert rings.run_pieces([first, Part("second", ("true",))], again=False) == 0
    assert count.read_text() == "x\n"
    rings.run_pieces([first], again=True)
    assert count.read_text() == "x\nx\n"


@pytest.mark.parametrize("codes", [("false", "true"), ("true", "false")])
def test_a_part_that_fails_ends_a_ring(tmp_path, codes):
    first = Part("first", (codes[0],), beside=Part("beside", (codes[1],)))
    assert rings.run_all("test", [first, Part("second", ("touch", f"{tmp_path}/there"))]) == 1
    assert not (tmp_path / "there").exists()


@pytest.mark.parametrize(
    ("only", "chosen"),
    [
        ("launcher", ["tests/unit/launcher"]),
        ("gpu train", ["tests/gpu", "tests/train"]),
        ("tests/unit/tools/test_rings.py::test_x", ["tests/unit/tools/test_rings.py::test_x"]),
    ],
)
def test_only_names_a_room_or_a_file(only, chosen):
    assert rings.paths(only) == chosen


@pytest.mark.parametrize("only", ["lancher", "tests/unit/no.py", "/etc", "../x"])
def test_only_of_nothing_is_refused(only, capsys):
    assert rings.main(["test", f"--only={only}"]) == 2
    assert only in capsys.readouterr().err


def test_a_make_within_a_test_has_none_of_the_ring_s_words_and_compiles_modules_once(
    tmp_path, monkeypatch
):
    (tmp_path / "Makefile").write_text("all: ; @echo '$(ONLY)' $$PYTHONDONTWRITEBYTECODE\n")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("MAKEFLAGS", " -- ONLY=lab")
    monkeypatch.setenv("ONLY", "lab")
    with (tmp_path / "log").open("w") as log:
        assert rings.run(Part("inner", ("make", "-s", "-C", str(tmp_path))), log) == 0
    assert (tmp_path / "log").read_text() == "\n"
