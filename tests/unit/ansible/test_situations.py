"""docs/situations.md quotes what is printed, and what `make check` says about those machines."""

import json
import re

import pytest
import yaml

from planning import driver, preflight
from tests.unit.ansible.provision_machines import HEALTHY, QUESTION, ROOT

PAGE = (ROOT / "docs/situations.md").read_text()
# Sections with lines, and rows with a part of one.
SECTION = r"^## [^\n]*`(\S+)`\n(?:(?!^## ).*?)^```\n(.*?)^```$"
QUOTED = re.findall(SECTION, PAGE, re.MULTILINE | re.DOTALL)
QUOTED += re.findall(r"^\| [^|]*`(\S+)` \| `([^|]+)` \|", PAGE, re.MULTILINE)
SETTINGS = yaml.safe_load((ROOT / "group_vars/all.yml").read_text())
# {file: what is found there}; faults in BLOCKING stop provisioning.
FOUND = {
    "2080ti-ubuntu2204-driver535": {"firewall", "gcc"},
    "1080ti-ubuntu2004-nouveau": {"nouveau"},
    "2080ti-ubuntu1804-offline-runfile410": {"python", "driver_old"},
    "3090-debian12-runfile550": set(),
    "5090-ubuntu2404": {"secure_boot", "nouveau"},
    "5090-ubuntu2404-unmatched": {"secure_boot", "nouveau", "driver"},
    "3090-debian12-secureboot": {"secure_boot", "nouveau"},
    "3090-ubuntu2404-transitional": set(),
    "3090-ubuntu2404-kde": set(),
    "2080ti-ubuntu1804-cuda102": {"python", "nouveau", "toolkit"},
    "2080ti-ubuntu1804-bare": {"python", "nouveau"},
    "5090-ubuntu2604": {"release", "secure_boot", "nouveau"},
    "2080ti-ubuntu2204-encrypted": {"nouveau", "gcc", "passphrase"},
    "3090-ubuntu2004-driver470": {"driver_old"},
    "k80-debian12": {"nouveau", "gcc"},
    "gt710-3090-debian12": {"nouveau", "card_left_out"},
    "gt210-debian12": {"card_left_out"},
    "3090-debian12-gpus0": set(),
    "3090-ubuntu2404-hwe7": {"nouveau"},
    "3090-debian13-backports": {"nouveau", "stack"},
    "3090-ubuntu2204-server-open": {"nouveau"},
    "4070-laptop-ubuntu2404": set(),
    "3090-ubuntu2404-control": {"nouveau"},
    "3090-debian12-failed-build": {"nouveau"},
    "3090-ubuntu2404-cuda-keyring": set(),
    "3090-ubuntu2404-ppa": set(),
    "1080ti-3090-ubuntu2204": {"nouveau"},
    "3090-ubuntu2404-vm": {"driver_missing"},
    "wsl2-ubuntu2404": {"wsl"},
}


def test_each_situation_is_on_the_page():
    assert [name for name, _ in QUOTED] == list(FOUND)


@pytest.mark.parametrize(("name", "lines"), QUOTED)
def test_the_page_quotes_what_is_printed_and_make_check_says_what_is_found(name, lines):
    printed = (ROOT / f"tests/unit/ansible/dry_provision/{name}.txt").read_text()
    assert [line for line in lines.splitlines() if line not in printed] == []
    (entry,) = json.loads((ROOT / f"examples/machines/{name}.json").read_text())
    wanted = driver.driver_wanted(entry.get("settings", {}), [])
    asked = {**QUESTION, "driver": wanted, "offline": wanted["offline"]}
    asked["conda_installer"] = SETTINGS["conda_installer"]
    counted = {"gpus_counted": entry.get("settings", {}).get("gpus")}
    found = preflight.findings({**HEALTHY, **entry["facts"], **counted}, asked)
    assert {finding["fault"] for finding in found} == FOUND[name]
