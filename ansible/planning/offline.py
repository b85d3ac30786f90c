"""List what machines without internet need from the bundle, by the inventory and by facts.

playbooks/bundle.yml plans `make bundle` with `bundle_order`, which knows only the inventory. Role
bundle checks the bundle with `bundle_needed`, when the machines have reported their facts.
"""

from pathlib import Path

import yaml

from . import PlanError, reading, stacks

ANSIBLE = Path(__file__).resolve().parents[1]


def bundle_order(hostvars, offline, stack, python=""):
    """Plan `make bundle` from the inventory alone. Returns needs for plan() of ansible/bundle.py.

    offline: names of the machines that have offline=true; their variables `release`, and `kernel`
    if they have a GPU, count. Without such machines the bundle has the stack's wheels for `python`,
    "" for the stack's preferred Python. Raises PlanError for a machine without `release`.
    """
    table = releases()
    row = _table("stacks.yml")["stacks"]["rows"].get(stack, {})
    nameless = [host for host in offline if not hostvars[host].get("release")]
    if nameless:
        raise PlanError(
            f"{', '.join(nameless)} has offline=true, and its packages depend on its release: in "
            "its line of inventory.ini write, for example, release=bookworm. To see the "
            "release, type on the machine: . /etc/os-release; echo $VERSION_CODENAME"
        )
    installs_driver = any(hostvars[host].get("driver_policy") != "keep" for host in offline)
    packages = offline_releases(hostvars, offline, row)
    # bundling/debs.py rejects a release that is not in the table, with a better sentence.
    in_table = [release for release in packages if release in table]
    release_pythons = {table[release]["python"] for release in in_table}
    # If a release's Python does not fit the stack, conda brings the stack's preferred Python ("").
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
    the release's (driver_candidates.name_kernel_gcc), and the gcc for apex
    (toolkit.choose_compiler).
    """
    table, packages = releases(), dict[str, set[str]]()
    for host in offline:
        release, kernel = (
            reading.setting(hostvars[host], name, host) for name in ("release", "kernel")
        )
        names = packages.setdefault(release, set())
        if stack.get("apex") and "extensions" in table.get(release, {}):
            names.add(table[release]["extensions"])
        if not kernel:  # the machine has no GPU, so it builds no module
            continue
        names.add(f"linux-headers-{kernel}")
        gcc = table.get(release, {}).get("gcc")
        if gcc and stacks.parse_version(kernel) >= stacks.parse_version(gcc["since"]):
            names.add(gcc["package"])
    return {release: sorted(names) for release, names in sorted(packages.items())}


def bundle_needed(hostvars, offline, machines, stack):
    """Plan the bundle from the facts of machines. Returns needs as `bundle_order` does.

    machines: {host: {"release": code name, "python": the version for its environment, "gpus": true
    if it has GPUs}}. Raises PlanError if the inventory has another release for a machine.
    """
    # `make bundle` knows only the inventory's release, whose packages would not fit the machine.
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
