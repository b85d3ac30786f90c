"""The control node gathers the files: what is missing is named, what was used once is kept."""

import json

import pytest

from planning import toolkit
from tests.unit.ansible.provision_machines import TABLE, load

toolkit_files = load("ansible/toolkit_files.py")
PART = {"file": "standin-cudnn.tgz", "url": "", "page": "https://developer.invalid", "sha256": ""}


def run(folder, *words):
    return toolkit_files.main(["--bundle", str(folder), "kit", json.dumps([PART]), *words])


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "installers/kit/standin-cudnn.tgz"
    path.parent.mkdir(parents=True)
    path.write_text("standin")
    return path


def test_the_first_use_counts_also_after_a_failure(tmp_path, file, capsys):
    assert run(tmp_path) == 0
    answer = json.loads(capsys.readouterr().out)
    first = answer["sha256"]["standin-cudnn.tgz"]
    (trusted,) = answer["trusted"]
    assert trusted.startswith("standin-cudnn.tgz: its publisher states no SHA-256")
    assert run(tmp_path) == 0
    assert json.loads(capsys.readouterr().out)["trusted"] == []
    for _ in range(2):
        file.write_text("another")
        assert run(tmp_path) == 2
        assert f"its SHA-256 is not {first}" in capsys.readouterr().err
    file.write_text("standin")
    assert run(tmp_path) == 0


def test_looking_gathers_nothing(tmp_path, file, capsys):
    assert run(tmp_path, "--list") == 0
    assert json.loads(capsys.readouterr().out) == {"sha256": {}, "trusted": []}
    assert not file.with_name("MANIFEST.sha256").exists()


def test_the_bundle_and_the_roles_mean_the_same_folder(tmp_path):
    """What `make bundle` gathered is complete for the roles: same files, same folder."""
    row = dict(TABLE["rows"]["cu102"], name="cu102")
    made = toolkit._plan_toolkit(row, TABLE)
    parts = [vars(part) for part in made.parts]
    mine = toolkit_files.order(made.bundle, parts, tmp_path)
    wanted = {"toolkit": "true", "apex": "auto", "driver_version": "auto"}
    theirs = toolkit_files.installers.plan("cu102", wanted, tmp_path)
    assert mine.purpose() in [order.purpose() for order in theirs if order.folder == mine.folder]


@pytest.mark.parametrize(("apex", "tools"), [("auto", True), ("false", False)])
def test_the_bundle_of_a_stack_with_apex_has_the_tools_that_build_it(tmp_path, apex, tools):
    bundle = load("ansible/bundle.py")
    wanted = {"wheels": [], "releases": {}, "packages": [], "conda": [], "mirrors": {},
              "driver_version": "auto", "stacks": ["cu102"], "toolkit": "auto", "apex": apex,
              "index_url": "x"}  # fmt: skip
    names = {order.folder.name for order in bundle.plan(wanted, tmp_path)}
    assert ("apex-build" in names) is tools
    assert "toolkit-10.2" in names
