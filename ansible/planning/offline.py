"""List what machines without internet need from the bundle, by the inventory and by facts."""

from pathlib import Path

import yaml

from . import PlanError, reading, stacks

ANSIBLE = Path(__file__).resolve().parents[1]


def bundle_order(hostvars, offline, stack, python=""):
    """Plan `make bundle` before any machine was asked: see plan() in ansible/bundle.py.

    offline: names of the machines that have offline=true; their `release`, and `kernel` if they
    have a GPU, are variables of the inventory. If there are none, the bundle has the stack's wheels
    for its preferred Python. Raises PlanError for a machine without `release`.
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
    installs_driver = any(hostvars[host].get("driver_policy") != "keep" for host in offline)
    packages = offline_releases(hostvars, offline, row)
    # A release that is not in the table is an error later, with a better sentence.
    in_table = [release for release in packages if release in table]
    release_pythons = {table[release]["python"] for release in in_table}
    # Machines with another Python get the stack's by conda.
    pythons = sorted({python} | (release_pythons & set(row.get("python", []))))
    return {
        "wheels": [[stack, name] for name in pythons],
        "releases": packages,
        "stacks": [stack] if installs_driver else [],
        "conda": any(table[name]["python"] not in row.get("python", []) for name in in_table),
    }


def offline_releases(hostvars, offline, stack):
    """List {code name: further packages} for the bundle; stack: a row of stacks.yml.

    The packages are the headers of the inventory's kernels, the gcc of these kernels if it is not
    the release's (driver_candidates.kernels_gcc), and the gcc for apex (toolkit.compiler).
    """
    table, packages = releases(), dict[str, set[str]]()
    for host in offline:
        release, kernel = (
            reading.setting(hostvars[host], name, host) for name in ("release", "kernel")
        )
        further = packages.setdefault(release, set())
        if stack.get("apex") and "extensions" in table.get(release, {}):
            further.add(table[release]["extensions"])
        if not kernel:  # no GPU, so no module is built
            continue
        further.add(f"linux-headers-{kernel}")
        gcc = table.get(release, {}).get("gcc")
        if gcc and stacks.version(kernel) >= stacks.version(gcc["since"]):
            further.add(gcc["package"])
    return {release: sorted(further) for release, further in sorted(packages.items())}


def bundle_needed(hostvars, offline, machines, stack):
    """Plan the bundle for machines that were asked; returns the shape of `bundle_order`.

    machines: {host: {"release": code name, "python": of its environment, "gpus": true if any}}.
    Raises PlanError if the inventory has another release.
    """
    # A bundle for another release would install nothing.
    for host in offline:
        setting, actual = hostvars[host].get("release"), machines[host]["release"]
        if setting != actual:
            raise PlanError(
                f"{host} is {actual}, but inventory.ini has release={setting or ''}: write "
                f"release={actual}, then run `make bundle`"
            )
    pythons = {machines[host]["python"] for host in offline}
    return {
        "wheels": [[stack, name] for name in sorted(pythons)],
        "releases": offline_releases(
            hostvars, offline, _table("stacks.yml")["stacks"]["rows"][stack]
        ),
        "stacks": [stack] if any(machines[host]["gpus"] for host in offline) else [],
    }


def releases():
    """Read {code name: row} of ansible/releases.yml, the only list of supported releases."""
    return _table("releases.yml")["releases"]


def _table(name):
    return yaml.safe_load((ANSIBLE / name).read_text())
