"""Every role documents its variables, and a test breaks its work and hears of it."""

import re

import pytest
import yaml

from tests.lab.test_site_verify import BREAKS
from tests.unit.ansible.provision_machines import ROOT, load

role_readmes = load("ansible/role_readmes.py")
ROLES = sorted(path for path in (ROOT / "ansible/roles").iterdir() if path.is_dir())


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_readme_is_generated_from_the_specs(role):
    assert (role / "README.md").read_text() == role_readmes.readme(role), (
        "run: python ansible/role_readmes.py"
    )


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_defaults_are_documented(role):
    specs = yaml.safe_load((role / "meta/argument_specs.yml").read_text())["argument_specs"]
    documented = {name for spec in specs.values() for name in spec.get("options", {})}
    defaults = role / "defaults/main.yml"
    if defaults.exists():
        assert set(yaml.safe_load(defaults.read_text())) <= documented


# role: the lab's test in which what it made, or what it looks for, is broken, and it says so.
BROKEN_IN = {
    **dict.fromkeys(BREAKS, "test_site_verify.py::test_the_break_is_named"),
    "accept": "test_accept.py::test_the_slow_cable_is_named_and_fails_the_check",
    "apex": "test_site_toolkit_apex.py::test_a_foreign_apex_in_the_environment_is_named",
    "bundle": "test_site_offline.py::test_a_broken_package_is_named_before_the_machine_is_touched",
    "cuda": "test_site_toolkit.py::test_make_verify_names_what_was_lost",
    "cudnn": "test_site_toolkit.py::test_make_verify_names_what_was_lost",
    "driver": "test_site_driver.py::test_make_verify_names_a_package_that_may_move",
    "nccl": "test_site_toolkit.py::test_make_verify_sees_what_is_missing",
    "network": "test_site_network.py"
    "::test_verification_names_an_address_that_the_next_boot_will_not_have",
    "offline": "test_site_offline.py::test_a_package_that_breaks_on_the_machine_is_named",
    "packages": "test_site_offline.py"
    "::test_a_package_that_somebody_removed_is_named_and_comes_back",
    "preflight": "test_site_check.py::test_planted_faults_are_all_said_at_once",
    "pycharm": "test_site_toolkit_pycharm.py::test_installed_on_request_and_taken_away",
    "reach": "test_site.py::test_require_all_ends_the_run_before_anything_is_changed",
    "share_client": "test_share_mounts.py::test_what_is_broken_is_named",
    "share_secret": "test_site_share.py::test_verification_names_what_is_wrong_with_the_password",
    "share_server": "test_site_share.py"
    "::test_verification_names_what_is_wrong_with_the_server_and_the_next_run_mends_it",
}


def test_each_role_has_a_planted_break():
    assert {role.name for role in ROLES} == BROKEN_IN.keys()
    for place in BROKEN_IN.values():
        file, _, test = place.partition("::")
        text = (ROOT / "tests/lab" / file).read_text()
        assert re.search(rf"^def {test}\(", text, re.M), place
