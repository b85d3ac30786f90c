"""Every role documents its variables."""

import pytest
import yaml

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
