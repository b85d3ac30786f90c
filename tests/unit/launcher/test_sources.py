"""What is read of a script's modules, in a time that grows as their number."""

from pathlib import Path

from launcher.plan import sources

OPTION = "def parser{0}(p):\n    p.add_argument('--local_rank')\n"


class Names(list):
    """What a source names; `read` counts the names that anybody takes out."""

    read = 0

    def __iter__(self):
        Names.read += len(self)
        return super().__iter__()


def test_many_modules_are_looked_through_in_linear_time(tmp_path, monkeypatch):
    """Each of 60 imports all others, and has a parser that none of them uses."""
    imports = "".join(f"import m{number}\n" for number in range(60))
    for number in range(60):
        (tmp_path / f"m{number}.py").write_text(imports + OPTION.format(number) * (number > 0))
    looked, is_file, foreign = [], Path.is_file, sources._foreign_names
    monkeypatch.setattr(Path, "is_file", lambda path: looked.append(path) or is_file(path))
    monkeypatch.setattr(sources, "_foreign_names", lambda body: Names(foreign(body)))
    loaded = sources.find_loaded(tmp_path / "m0.py", [tmp_path])
    assert len(loaded.sources) == 60 and len(looked) < 60 * 10
    assert sources.find_declared_option(loaded.sources, ("--local_rank",)) is None
    assert Names.read <= 60 * 60 * 2  # of each source once, not once for each of the others
