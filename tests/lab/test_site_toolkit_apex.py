"""apex from a stand-in of its source: built on each machine for itself, others refused."""

import json
import subprocess
import sys
from typing import ClassVar

import pytest

from tests.lab.apt_archive import give_packages
from tests.lab.conftest import CHECKOUT
from tests.lab.site_plays import changes, failures, said
from tests.lab.standins import standin_toolkit
from tests.lab.test_site_toolkit import HOSTS, LAST, NODES, NONE, PLAY, UNINSTALL, Toolkit

ENV = "/opt/standin-env"
CODE = 'import apex, importlib.metadata as m; print(m.version("apex"), apex.STANDIN)'
SHOW = f"{ENV}/bin/python -c '{CODE}'"

# A machine that was taken over: the wheels it builds run a command whenever Python starts.
LIAR = f"""#!/bin/bash
/bin/bash -c 'exec -a {ENV}/bin/python /usr/bin/python3 "$@"' sh "$@" || exit
case "$*" in *bdist_wheel*) /usr/bin/python3 -c '
import glob, sys, zipfile
line = "import os; os.system(\\"id -un >> /var/tmp/owned; chmod 666 /var/tmp/owned\\")"
for name in glob.glob(sys.argv[1] + "/*.whl"):
    zipfile.ZipFile(name, "a").writestr("taken.pth", line)
' "${{@: -1}}" ;; esac
"""


# As preflight leaves them on a machine with a card: what its packages offer is among the facts.
WITH_PACKAGES = """
    - name: Collect which compilers its packages offer
      driver_facts: {pin: /etc/apt/preferences.d/tandem-driver}
      register: offered
    - name: Keep them too
      ansible.builtin.set_fact:
        preflight_facts: "{{ preflight_facts | combine(offered.facts) }}"
  roles: [cuda, cudnn, nccl, apex]
"""


class Apex(Toolkit):
    """The same machines and stand-ins, with an environment without torch and apex wanted."""

    asked: ClassVar = {
        "toolkit": False,
        "apex": True,
        "env_python": f"{ENV}/bin/python",
        "pip_index_url": "https://pypi.org/simple",
        "run_user": "tandem",
    }

    @property
    def source(self):
        return self.bundle / "installers/apex-22.04-dev/standin-apex-22.04-dev.tar.gz"


@pytest.fixture(scope="module")
def apex(start_lab, tmp_path_factory):
    folder = tmp_path_factory.mktemp("apex")
    made = Apex(start_lab("apex", "--nodes", "2", "--no-bundle"), folder)
    (folder / "play.yml").write_text(PLAY.replace("[cuda, cudnn, nccl]", "[cuda, apex]"))
    (folder / "uninstall.yml").write_text(UNINSTALL.replace("[nccl, cudnn, cuda]", "[apex]"))
    # What builds it is real and comes from the package index, which the lab cannot reach.
    gather = [sys.executable, CHECKOUT / "ansible/toolkit_files.py", "--bundle", made.bundle]
    index = "https://pypi.org/simple"
    subprocess.run([*gather, "--tools-from", index, "standin-none", "[]"], check=True)
    for node in NODES:
        made.lab.ssh(node, f"sudo python3 -m venv {ENV}")
    return made


def test_a_machine_that_was_taken_over_is_root_on_itself_alone(apex):
    python = f"{ENV}/bin/python"
    apex.lab.ssh(1, f"sudo mv {python} {python}.kept; sudo tee {python} > /dev/null", input=LIAR)
    apex.lab.ssh(1, f"sudo chmod 755 {python}")
    apex.play()
    apex.play()
    assert "root" in apex.lab.ssh(1, "cat /var/tmp/owned")
    assert apex.lab.ssh(2, "cat /var/tmp/owned || true") == ""
    assert "apex" in apex.lab.ssh(2, f"{python} -m pip list")
    assert not list(apex.bundle.rglob("apex-*.whl"))
    apex.lab.ssh(1, f"sudo mv {python}.kept {python}; sudo rm -r {ENV}/.tandem-apex")
    apex.lab.ssh(1, "sudo find /opt/standin-env -name taken.pth -delete; sudo rm /var/tmp/owned")
    apex.uninstall()


def test_built_on_each_machine_and_taken_away(apex):
    predicted = apex.play("--check")
    assert "apex 22.04-dev would be installed" in said(predicted)
    apex.play()
    assert not list(apex.bundle.rglob("apex-*.whl"))
    for node in NODES:
        assert apex.lab.ssh(node, SHOW) == "0.1+standin True\n"
        assert "apex-build" not in apex.lab.ssh(node, "ls /var/lib/tandem")
    again = apex.play()
    assert changes(again) == NONE
    assert changes(apex.play("--check")) == NONE
    apex.uninstall()
    for node in NODES:
        assert "apex" not in apex.lab.ssh(node, f"{ENV}/bin/python -m pip list; ls -A {ENV}")
    assert changes(apex.uninstall()) == NONE


def test_a_half_installation_is_repeated(apex):
    apex.play()
    apex.lab.ssh(1, f"sudo rm {ENV}/.tandem-apex")
    done = apex.play()
    assert changes(done)["node1"] and not changes(done)["node2"]
    for node in NODES:
        assert apex.lab.ssh(node, SHOW) == "0.1+standin True\n"


def test_an_apex_without_amp_is_refused(apex):
    whole = apex.source.read_bytes()
    manifest = apex.source.with_name("MANIFEST.sha256")
    standin_toolkit.apex(apex.source, amp=False)
    changed = apex.play(check=False)
    assert failures(changed) == set(HOSTS)
    assert "standin-apex-22.04-dev.tar.gz is not the expected file" in said(changed)
    manifest.unlink(missing_ok=True)  # as if it were the first use
    refused = apex.play(check=False)
    assert failures(refused) == set(HOSTS)
    assert "has no apex/amp: it is PyPI's apex, another project" in said(refused)
    assert "apex-build" not in apex.lab.ssh(1, "ls /var/lib/tandem")
    apex.source.write_bytes(whole)
    manifest.unlink(missing_ok=True)


def test_a_foreign_apex_in_the_environment_is_named(apex):
    apex.play()
    folder = apex.lab.ssh(
        LAST, f"dirname $({ENV}/bin/python -c 'import apex; print(apex.__file__)')"
    ).strip()
    apex.lab.ssh(LAST, f"sudo rm -r {folder}/amp")
    done = apex.play(check=False)
    assert failures(done) == {f"node{LAST}"}
    assert f"does not work on node{LAST}" in said(done) and "amp" in said(done)


def test_an_older_compiler_of_the_archive_builds_the_extensions(apex):
    """Debian's own g++-11 where the stack takes 11 and Debian's gcc is 12; as 20.04's 7."""
    give_packages(apex.lab, [*NODES], "gcc", "g++-11")
    begin, end = PLAY.split("  roles:")[0], WITH_PACKAGES.lstrip("\n")
    (apex.folder / "play.yml").write_text(begin + end)
    variables = json.loads((apex.folder / "vars.json").read_text())
    variables |= {"toolkit": True, "apex_extensions": True}
    variables["preflight_stack"]["gcc"] = 11
    (apex.folder / "vars.json").write_text(json.dumps(variables))
    apex.play()
    ask = f"{ENV}/bin/python -c 'from apex import built; print(built.BY)'"
    for node in NODES:
        assert apex.lab.ssh(node, ask) == "['gcc-11', 'g++-11', '11\\n', '11\\n']\n"
    assert changes(apex.play()) == NONE
