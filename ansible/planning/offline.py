"""What machines without internet need from the bundle: functions of the inventory and of facts."""

from pathlib import Path

import yaml

from . import PlanError, reading, stacks

ANSIBLE = Path(__file__).resolve().parents[1]


def bundle_order(hostvars, offline, stack, python=""):
    """What `make bundle` gathers, before any machine was asked: see plan() in ansible/bundle.py.

    offline: names of the machines that have offline=true. Each one's `release`, and `kernel` where
    it has a GPU, are variables of the inventory. Without any: the wheels of the stack for the
    Python that it prefers.
    """
    table = releases()
    row = _table("stacks.yml")["stacks"]["rows"].get(stack, {})
    nameless = [host for host in offline if not hostvars[host].get("release")]
    if nameless:
        raise PlanError(
            f"{', '.join(nameless)} has offline=true, and its packages depend on its release: in "
            "its line of inventory.ini write, for example, release=bookworm. The machine says its "
            "own by: . /etc/os-release; echo $VERSION_CODENAME"
        )

    def installs_driver(host):
        return hostvars[host].get("driver_policy") != "keep"

    wanted = offline_releases(hostvars, offline, row)
    in_table = [release for release in wanted if release in table]
    own = {table[release]["python"] for release in in_table}
    pythons = sorted({python} | (own & set(row.get("python", []))))
    return {
        "wheels": [[stack, each] for each in pythons],
        "releases": wanted,
        "stacks": [stack] if any(map(installs_driver, offline)) else [],
        "conda": any(table[name]["python"] not in row.get("python", []) for name in in_table),
    }


def offline_releases(hostvars, offline, stack):
    """{code name: further packages}: headers of the kernels that the inventory names, the gcc that
    builds modules for them, where it is not the release's own (driver_candidates.kernels_gcc), and
    the one that builds apex (toolkit.compiler). stack: a row of stacks.yml."""
    table, packages = releases(), dict[str, set[str]]()
    for host in offline:
        release, kernel = (
            reading.setting(hostvars[host], name, host) for name in ("release", "kernel")
        )
        further = packages.setdefault(release, set())
        if stack.get("apex") and "extensions" in table.get(release, {}):
            further.add(table[release]["extensions"])
        if not kernel:
            continue
        further.add(f"linux-headers-{kernel}")
        gcc = table.get(release, {}).get("gcc")
        if gcc and stacks.version(kernel) >= stacks.version(gcc["since"]):
            further.add(gcc["package"])
    return {release: sorted(further) for release, further in sorted(packages.items())}


def bundle_needed(hostvars, offline, machines, stack):
    """What these machines need, now that they were asked: the same shape as `bundle_order`.

    `machines`: {host: {"release": code name, "python": of its environment, "gpus": whether any}}.
    """
    for host in offline:
        setting, actual = hostvars[host].get("release"), machines[host]["release"]
        if setting != actual:
            raise PlanError(
                f"{host} is {actual}, and inventory.ini says release={setting or ''} for it: write "
                f"release={actual}, then run `make bundle`"
            )
    pythons = {machines[host]["python"] for host in offline}
    return {
        "wheels": [[stack, each] for each in sorted(pythons)],
        "releases": offline_releases(
            hostvars, offline, _table("stacks.yml")["stacks"]["rows"][stack]
        ),
        "stacks": [stack] if any(machines[host]["gpus"] for host in offline) else [],
    }


def releases():
    """{code name: row} of ansible/releases.yml, the only list of the releases that are known."""
    return _table("releases.yml")["releases"]


def _table(name):
    return yaml.safe_load((ANSIBLE / name).read_text())
