"""What goes where: the plan of toolkit and apex, and the list that make dry-provision prints."""

import json
import re

import pytest
import yaml

from planning import PlanError, driver_result
from tests.unit.ansible.provision_machines import (
    ROOT,
    TABLE,
    by_the_default,
    load,
    machine,
    reviewed,
    stand_in,
)

dry = load("ansible/dry_provision.py")
stacks = dry.stacks
toolkit = dry.toolkit

AUTO = {"toolkit": "auto", "apex": "auto", "apex_extensions": "auto"}
MACHINES = [
    pytest.param(path, id=path.stem, marks=by_the_default if "python36" in path.stem else ())
    for path in sorted((ROOT / "examples/machines").glob("*.json"))
]
EXPECTED = ROOT / "tests/unit/ansible/dry_provision"


def plan(*machines, stack="cu102", **wanted):
    row = dict(TABLE["rows"][stack], name=stack)
    return toolkit.toolkit_plan(machines, row, {**AUTO, **wanted}, TABLE)


def turing(host="node1", **changes):
    return machine("ubuntu2204", ["1e07"], host=host, **changes)


# A bare 18.04: the second run found a gcc that the first had installed, and went on.
OFFERED = {"packages": {}, "offered": {"gcc": "4:7.4.0-1ubuntu2.3"}}
# Ubuntu 20.04's universe has 7 and 8, and torch 1.12.1 takes none after 8.0.0.
FOCAL = {"g++": "4:9.3.0-1ubuntu2", "g++-7": "7.5.0-6ubuntu2", "g++-8": "8.4.0-3ubuntu2"}


def focal(gcc="9.4.0", **changes):
    return machine("ubuntu2004", ["1e07"], gcc=gcc, **changes)


def there(version, gcc="7.5.0", folder="/usr/local/cuda-10.2"):
    """The first users' own machines have CUDA 10.2 by NVIDIA's runfile."""
    return turing(gcc=gcc, toolkits={folder: version})


PLANS = {
    "gcc 7": plan(turing(gcc="7.5.0"), machine(host="node2")),
    "gcc 8": plan(turing(gcc="8.3.0")),  # torch 1.12.1: "maximum required version ... (8.0.0)"
    "no gcc, toolkit": plan(turing(gcc=None), toolkit=True),
    "first run": plan(machine("ubuntu1804", ["1e07"], gcc=None, **OFFERED)),
    "second run": plan(machine("ubuntu1804", ["1e07"], gcc="7.5.0", **OFFERED)),
    "older gcc offered": plan(focal(offered=FOCAL)),
    "older gcc not needed": plan(machine("ubuntu1804", ["1e07"], gcc="7.5.0", offered=FOCAL)),
    "older gcc not wanted": plan(focal(offered=FOCAL), apex_extensions=False),
    "newer stack": plan(machine(cards=["2204"]), stack="cu132"),
    "newer stack, toolkit": plan(machine(cards=["2204"]), stack="cu132", toolkit=True),
    "driver kept": plan(turing(gcc="7.5.0", driver_kept=True)),
    "driver kept, asked for": plan(turing(gcc="7.5.0", driver_kept=True), toolkit=True, apex=True),
    "driver kept, beside another": plan(
        turing(gcc="7.5.0", driver_kept=True), turing("node2", gcc="7.5.0")
    ),
    "theirs by its link": plan(there("10.2.89", folder="/usr/local/cuda")),
    "theirs is another, toolkit": plan(there("10.1.243"), toolkit=True),  # refused by the role
    "theirs says nothing": plan(there(None)),
    "theirs, gcc 11": plan(there("10.2.89", gcc="11.4.0")),
    "theirs, no toolkit": plan(there("10.2.89"), toolkit=False),
}


def shown(made):
    lines = []
    for host, rows in made.items():
        kit, found, apex = rows["toolkit"], rows["foreign"], rows["apex"]
        names = kit and " ".join(part["name"] for part in kit["parts"])
        lines.append(f"{host} toolkit: {kit and kit['folder']} {names or ''}".rstrip())
        for name, row in (("found", found), ("apex", apex)):
            lines += [f"{host} {name} {key}: {row[key]}" for key in row or () if key != "part"]
    return "\n".join(line.removesuffix(": ") for line in lines)


def test_plans_are_those_that_were_reviewed():
    reviewed("toolkit_plans.txt", {case: shown(made) for case, made in PLANS.items()})


@pytest.mark.parametrize("part", ["toolkit", "apex"])
def test_what_is_made_for_x86_is_refused_elsewhere_by_its_name(part):
    spark = machine("ubuntu2404", ["2e12"], arch="aarch64", driver_kept=True)
    with pytest.raises(PlanError, match=rf"{part} is true, .* node1's processor \(aarch64\)"):
        plan(spark, **{part: True})


def test_each_machine_builds_apex_for_its_own_cards():
    """And with extensions on all or none: what one says of itself changes no other's wheel."""
    old = machine("ubuntu1804", ["1b06"], host="node2", gcc="7.5.0", glibc="2.17")
    made = plan(turing(gcc="7.5.0"), old)
    assert [made[host]["apex"]["arch_list"] for host in made] == ["7.5", "6.1"]
    assert all(made[host]["apex"]["extensions"] for host in made)
    assert "build_host" not in made["node1"]["apex"]
    mixed = plan(turing(gcc="11.4.0"), old)
    assert not any(mixed[host]["apex"]["extensions"] for host in mixed)
    assert "node1: gcc 11.4.0" in mixed["node2"]["apex"]["reason"]


def test_every_file_is_fetched_by_its_checksum_or_by_hand():
    entries = [entry for parts in TABLE["toolkits"].values() for entry in parts]
    for entry in [*entries, *TABLE["apex"].values()]:
        assert entry["page"].startswith("https://")
        if entry["url"]:
            assert entry["url"].startswith("https://") and entry["url"].endswith("/")
            # Where the source says that nobody publishes one, that of the first use counts.
            known = entry["sha256"] or entry["name"] == "nccl"
            assert known, entry["file"]
        if entry.get("commit"):
            assert re.fullmatch("[0-9a-f]{40}", entry["commit"])
        assert entry["sha256"] is None or re.fullmatch("[0-9a-f]{64}", entry["sha256"])
    for row in TABLE["rows"].values():
        assert row["cuda"] is None or [part["name"] for part in TABLE["toolkits"][row["toolkit"]]]


@pytest.mark.parametrize("path", MACHINES)
def test_dry_provision_prints_the_whole_list(path, tmp_path):
    expected = EXPECTED / f"{path.stem}.txt"
    right = f"right? then: make dry-provision FACTS={path.relative_to(ROOT)} > {expected}"
    try:
        printed = dry.format_rows(dry.plan_rows(dry.read_facts_file(path), TABLE, tmp_path))
    except PlanError as error:
        printed = f"tandem: {error}"
    else:
        assert max(len(line) for line in printed.splitlines()) <= 80
    assert printed + "\n" == expected.read_text(), right


@pytest.mark.parametrize(
    ("fact", "code", "words"),
    [("host", 2, "is not a file of facts"), ("kernel", 2, "the facts of node1 lack 'kernel'"),
     ("interface", 0, "")],  # this plan does not need the last one
)  # fmt: skip
def test_a_file_of_facts_that_lacks_one_is_refused_by_its_name(fact, code, words, tmp_path, capsys):
    """An older form: nobody gets a traceback."""
    (entry,) = json.loads((ROOT / "examples/machines/2080ti-ubuntu2204-driver535.json").read_text())
    del entry["facts"][fact]
    (tmp_path / "old.json").write_text(json.dumps([entry]))
    assert dry.main(["--facts", str(tmp_path / "old.json")]) == code
    said = capsys.readouterr()
    assert words in said.err and bool(said.out) == (code == 0)


OFF = '[{"facts": {"host": "pc1"}}, {"facts": {"host": "pc2"}}]'  # none answered


@pytest.mark.parametrize("text", ["{", "[1]", '[{"settings": {}}]', OFF])
def test_a_file_that_is_no_list_of_facts_is_refused(text, tmp_path, capsys):
    (tmp_path / "odd.json").write_text(text)
    assert dry.main(["--facts", str(tmp_path / "odd.json")]) == (1 if text is OFF else 2)
    said = capsys.readouterr().err
    assert said.startswith("tandem: ") and ("pc1, pc2:" if text is OFF else "odd.json") in said


def test_nvcc_of_a_toolkit_is_asked_for_its_version(tmp_path, monkeypatch):
    facts = load("ansible/library/machine_facts.py")
    monkeypatch.setattr(facts, "TOOLKITS", f"{tmp_path}/cuda*")
    said = "Cuda compilation tools, release 10.2, V10.2.89"  # as nvcc 10.2 prints it
    for name, script in (
        ("cuda-10.2", f"echo '{said}'"),
        ("cuda-10.1", "exit 1"),
        ("cuda-9.0", ""),
    ):
        (tmp_path / name / "bin").mkdir(parents=True)
        if script:
            stand_in(tmp_path / name / "bin", nvcc=script)
    (tmp_path / "cuda").symlink_to("cuda-10.2")
    (tmp_path / "cuda-12.6/.tandem").mkdir(parents=True)
    (tmp_path / "cuda-12.6/.tandem/cuda").touch()
    (tmp_path / "cuda-samples").mkdir()
    found = {f"{tmp_path}/cuda-{n}": None for n in ("10.1", "9.0")}
    assert facts.find_toolkits() == {**found, f"{tmp_path}/cuda-10.2": "10.2.89"}


def test_the_settings_of_the_driver_are_those_that_its_role_documents():
    spec = yaml.safe_load((ROOT / "ansible/roles/driver/meta/argument_specs.yml").read_text())
    options = spec["argument_specs"]["main"]["options"]
    for setting in dry.driver.SETTINGS.values():
        if setting.name != "offline":  # every role's
            said = options[setting.name]
            assert said["default"] == setting.default
            assert tuple(said.get("choices", ())) == setting.choices


@pytest.mark.parametrize(("said", "offline"), [("false", False), ("true", True), (True, True)])
def test_settings_are_taken_as_an_inventory_says_them(said, offline):
    wanted = dry.driver.driver_wanted({"offline": said, "driver_version": 580.126}, ["a.run"])
    assert wanted["offline"] is offline and wanted["at_hand"] == ["a.run"]
    assert (wanted["policy"], wanted["version"]) == ("install", "580.126")


@pytest.mark.parametrize("nothing", [None, ""])
def test_a_setting_without_a_value_is_the_default(tmp_path, capsys, nothing):
    """`driver_version:` in group_vars/all.yml, or driver_version= in a machine's line."""
    names = [row.name for row in dry.driver.SETTINGS.values()]
    names += ["toolkit", "apex", "apex_extensions", "env_manager"]
    settings = {**dry.read_settings(), **dict.fromkeys(names, nothing)}
    (entry,) = json.loads((ROOT / "examples/machines/2080ti-ubuntu2204.json").read_text())
    as_by_default = dry.plan_rows([{**entry, "settings": dry.read_settings()}], TABLE, tmp_path)
    assert dry.plan_rows([{**entry, "settings": settings}], TABLE, tmp_path) == as_by_default
    assert driver_result.power_plan("node1", nothing, nothing, "")["watts"] == 0


def dry_provision(tmp_path, capsys, file, **changes):
    """(code, what is printed, the error) for a recorded machine with other facts or settings."""
    (entry,) = json.loads((ROOT / f"examples/machines/{file}.json").read_text())
    entry["facts"] |= changes.pop("facts", {})
    (tmp_path / "facts.json").write_text(json.dumps([{**entry, **changes}]))
    code = dry.main(["--facts", str(tmp_path / "facts.json")])
    return code, *capsys.readouterr()


@pytest.mark.parametrize("stack", ["auto", "cpu"])
def test_a_card_that_no_table_has_is_one_sentence_and_its_remedy_works(tmp_path, capsys, stack):
    facts, settings = {"gpus": [{"vendor": "10de", "device": "3e04"}]}, {"stack": stack}
    code, said, error = dry_provision(
        tmp_path, capsys, "3090-debian12", facts=facts, settings=settings
    )
    if stack == "cpu":
        assert code == 0 and "NVIDIA 3e04, a card that is not in ansible/stacks.yml" in said
    else:
        assert (code, said) == (1, "") and error.startswith("tandem: node1: ")
        assert "card 3e04" in error
        assert error.count("\n") == 1


@pytest.mark.parametrize(
    "settings",
    [{"driver_policy": "upgrde"}, {"allow_stop_display": "perhaps"}, {"stack": "cu1"}],
)
def test_a_setting_that_cannot_be_is_one_sentence(settings, tmp_path, capsys):
    code, said, error = dry_provision(tmp_path, capsys, "3090-debian12", settings=settings)
    (value,) = settings.values()
    assert (code, said) == (1, "") and repr(value) in error and error.count("\n") == 1
