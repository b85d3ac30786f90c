"""What driver_facts reads from the output of dpkg, apt, modinfo and systemctl."""

import re
import subprocess
import sys

import pytest

from tests.unit.ansible.driver_machines import GDM, facts, names, plan, refused, ubuntu_relations
from tests.unit.ansible.provision_machines import load

collect = load("ansible/library/driver_facts.py")
kernels = sys.modules["ansible.module_utils.kernels"]

DPKG = """\
ii \tnvidia-smi\t535.261.03-1\tlibnvidia-ml1 (= 535.261.03-1), libc6 (>= 2.4)
hi \tlinux-image-amd64\t6.1.129-1\tlinux-image-6.1.0-31-amd64 (= 6.1.128-1)
iF \tnvidia-kernel-dkms\t535.261.03-1\tdkms
rc \tnvidia-driver\t470.1-1\t
ii \tbash\t5.2.15-2+b8\tlibc6 (>= 2.36)
"""
# As dpkg of Ubuntu 24.04 shows it (packages.ubuntu.com, noble-updates).
NOBLE = "ii \tnvidia-driver-550\t550.163.01-0ubuntu0.24.04.2\tnvidia-driver-580\n"


NOTHING = {"packages": {}, "kernel_series": None}


@pytest.fixture
def says(monkeypatch):
    """says(words, text): what a command whose line begins with `words` prints; others fail."""
    answers = {}

    def output(*argv, seconds=10):
        line = " ".join(argv)
        return next((text for begin, text in answers.items() if line.startswith(begin)), None)

    monkeypatch.setattr(collect, "output", output)
    return lambda words, text: answers.update({words: text.strip()})


def test_packages_that_count_are_installed_whole(says):
    says("dpkg-query", DPKG)
    assert collect.list_installed("6.1.0-31-amd64") == {
        "packages": {"nvidia-smi": "535.261.03-1", "linux-image-amd64": "6.1.129-1"},
        "held": ["linux-image-amd64"],
        "transitional": {},
        "kernel_series": "amd64",
    }
    says("dpkg-query", NOBLE)
    assert collect.list_installed()["transitional"] == {"nvidia-driver-550": "nvidia-driver-580"}


@pytest.mark.parametrize(
    ("running", "waiting", "series"),
    [
        ("6.8.0-86-generic", "6.14.0-33-generic", "generic"),
        ("6.11.0-29-generic", "6.14.0-33-generic", "generic-hwe-24.04"),
        ("6.15.4-x64v3-xanmod1", None, None),
        ("6.11.0-29-generic", "7.0.1-070001-generic", None),  # mainline's, by its own packages
    ],
)
def test_the_kernels_series_is_that_of_the_metapackage_which_brings_it(
    says, monkeypatch, running, waiting, series
):
    line = "ii \tlinux-image-{}\t{}\tlinux-image-{}-generic, linux-firmware\n".format
    hwe = line("generic-hwe-24.04", "6.14.0-33.33~24.04.1", "6.14.0-33")
    monkeypatch.setattr(collect.platform, "release", lambda: running)
    says("dpkg-query", line("generic", "6.8.0-86.87", "6.8.0-86") + hwe)
    assert collect.list_installed(waiting)["kernel_series"] == series


@pytest.mark.parametrize(
    ("name", "depends", "leads"),
    [
        # packages.ubuntu.com: "Extra drivers ... (dummy transitional package)".
        ("linux-modules-nvidia-535-generic-hwe-24.04", "linux-modules-nvidia-580-generic-hwe-24.04",
         True),
        # Ubuntu 26.04, whose branches from 615 on have no proprietary module.
        ("nvidia-driver-615", "nvidia-driver-615-open", True),
        ("nvidia-driver-580", "nvidia-dkms-580 (<= 580.178.04-1), nvidia-utils-580", False),
        # Debian 11: apt-cache show.
        ("nvidia-tesla-450-kernel-dkms", "nvidia-tesla-470-kernel-dkms, dkms (>= 2.1.0.0)", True),
    ],
)  # fmt: skip
def test_only_what_leads_to_another_branch_is_transitional(name, depends, leads):
    assert bool(collect.find_target(name, depends)) is leads


def test_of_two_modules_the_newer_one_counts(says, monkeypatch):
    """Debian's alternatives prefer it; a legacy driver may stay beside its successor."""
    folders = ["/var/lib/dkms/nvidia-legacy-390xx", "/var/lib/dkms/nvidia-tesla-470"]
    monkeypatch.setattr(collect.glob, "glob", lambda pattern: folders)
    says("modinfo -k 5.10.0-35-amd64 -F version nvidia-legacy-390xx", "390.157")
    says("modinfo -k 5.10.0-35-amd64 -F version nvidia-tesla-470", "470.256.02")
    says("modinfo -k 6.1.0-31-amd64 -F version nvidia-current", "535.261.03")
    assert collect.read_module_version("5.10.0-35-amd64") == "470.256.02"
    assert collect.read_module_version("6.1.0-31-amd64") == "535.261.03"
    assert collect.read_module_version("5.10.0-36-amd64") is None


OLD, NEW = "535.261.03-1", "535.300.01-1"


def stanza(name, version, *lines):
    told = [f"Package: {name}", f"Version: {version}", "Architecture: all", *lines]
    return "\n".join([*told, "Description: stand-in", "", ""])


def driver(version, *lines):
    """The packages of a driver, one of which requires another at the same version."""
    gsp = stanza("firmware-nvidia-gsp", version, *lines)
    depends = f"Depends: firmware-nvidia-gsp (= {version})"
    return gsp + stanza("nvidia-kernel-dkms", version, depends, *lines)


def fields(packages):
    """An archive's index of packages as driver_machines.ubuntu_relations gives them."""
    return "".join(
        stanza(name, told["Version"], *(f"{key}: {told[key]}" for key in told if key != "Version"),
               "Filename: ./none.deb", "Size: 1")
        for name, told in packages.items()
    )  # fmt: skip


@pytest.fixture
def apt(tmp_path, monkeypatch):
    """apt(status, index): the real apt of a machine with these packages, and this archive."""
    for folder in ("lists/partial", "archives/partial", "preferences.d"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "sources").write_text(f"deb [trusted=yes] file:{tmp_path} ./\n")
    (tmp_path / "apt.conf").write_text(
        f'Dir::State "{tmp_path}"; Dir::State::status "{tmp_path}/status"; Dir::Cache "{tmp_path}";'
        f'Dir::Etc::sourcelist "{tmp_path}/sources"; Dir::Etc::sourceparts "/dev/null";'
    )
    monkeypatch.setenv("APT_CONFIG", str(tmp_path / "apt.conf"))
    monkeypatch.setattr(collect, "PREFERENCES", f"{tmp_path}/preferences.d/*")

    def begin(status, index):
        (tmp_path / "status").write_text(status)
        (tmp_path / "Packages").write_text(index)
        subprocess.run(["apt-get", "-q", "update"], check=True, capture_output=True)

    return begin


def pinned(path, version, priority=1001):
    pin = f"Package: nvidia-kernel-dkms\nPin: version {version}\nPin-Priority: {priority}\n"
    path.write_text(pin)
    return str(path)


def test_what_we_hold_is_no_reason_against_a_driver_and_what_is_missing_is(apt, tmp_path):
    """Our own pin does not count; another's does, and so does what a driver depends on."""
    both = driver(NEW, "Filename: ./none.deb", "Size: 1")
    apt(driver(OLD, "Status: hold ok installed"), both)
    ours = pinned(tmp_path / "preferences.d/tandem-driver", OLD)
    found = collect.read_archive(ours, simulate=True, installed=NOTHING)
    assert found["offered"]["nvidia-kernel-dkms"] == NEW
    assert found["uninstallable"] == {} and collect.apt_broken() is None
    pinned(tmp_path / "preferences.d/theirs", OLD)
    theirs = collect.read_archive(ours, simulate=False, installed=NOTHING)
    assert theirs["offered"]["nvidia-kernel-dkms"] == OLD
    apt("", both.partition("\n\n")[2])  # Debian 12 without non-free-firmware
    missing = f"nvidia-kernel-dkms : Depends: firmware-nvidia-gsp (= {NEW}) "
    found = collect.read_archive(ours, simulate=True, installed=NOTHING)
    assert found["uninstallable"]["nvidia-kernel-dkms"].startswith(missing)
    pinned(tmp_path / "preferences.d/theirs", NEW, priority=-1)
    assert collect.read_archive(ours, simulate=False, installed=NOTHING)["offered"] == {}


def test_what_broke_off_is_named_and_is_no_reason_against_a_driver(apt):
    unpacked = driver(OLD, "Status: install ok unpacked").partition("\n\n")[2]
    apt(unpacked, driver(OLD, "Filename: ./none.deb", "Size: 1"))
    assert collect.read_archive("/none", simulate=True, installed=NOTHING)["uninstallable"] == {}
    said = collect.apt_broken()
    assert said.startswith(f"nvidia-kernel-dkms : Depends: firmware-nvidia-gsp (= {OLD})")


KERNEL, SERIES = "6.14.0-33-generic", "generic-hwe-24.04"
ON_SERIES = {"packages": {}, "kernel_series": SERIES}
DKMS = stanza("dkms", "3.0.11", "Filename: ./none.deb", "Size: 1")
DRIVER, LATER = "580.173.02-0ubuntu0.24.04.1", "580.180.01-0ubuntu0.24.04.1"


def coming(*names):
    """What the real apt would install."""
    argv = ["apt-get", "--simulate", "--no-install-recommends", "install", *names]
    done = subprocess.run(argv, check=True, capture_output=True, text=True)
    return re.findall(r"^Inst (\S+)", done.stdout, re.MULTILINE)


def test_the_plan_under_secure_boot_is_one_with_which_apt_builds_nothing(apt, monkeypatch):
    """Stand-ins for Ubuntu's packages, with the real ones' relations, and the real apt."""
    monkeypatch.setattr(collect.platform, "release", lambda: KERNEL)
    apt("", fields(ubuntu_relations(DRIVER, DRIVER, KERNEL, SERIES)) + DKMS)
    # With the modules of one kernel alone, or with none, apt builds one: so the plan was before.
    for modules in ([f"linux-modules-nvidia-580-open-{KERNEL}"], []):
        assert "nvidia-dkms-580-open" in coming(*modules, "nvidia-driver-580-open")
    found = collect.read_archive("/none", simulate=True, installed=ON_SERIES)
    # What preflight judges by, which simulates nothing.
    unsimulated = collect.read_archive("/none", simulate=False, installed=ON_SERIES)
    assert unsimulated["prebuilt"].keys() == found["prebuilt"].keys()
    made = facts("ubuntu2404", ["5090"], kernel=KERNEL, secure_boot=True, **GDM)
    assert found["offered_transitional"]["nvidia-driver-570-open"] == "nvidia-driver-580-open"
    chosen = plan(made | found, "cu132")
    wanted = names(chosen)
    assert wanted[0] == f"linux-modules-nvidia-580-open-{SERIES}"
    assert f"linux-modules-nvidia-580-open-{KERNEL}" in coming(*wanted)
    assert [name for name in coming(*wanted) if "dkms" in name.replace("no-dkms", "")] == []


def test_modules_that_are_older_than_the_driver_are_refused_under_secure_boot(apt, monkeypatch):
    """The metapackage then stands for an older nvidia-dkms than the driver depends on."""
    monkeypatch.setattr(collect.platform, "release", lambda: KERNEL)
    index = ubuntu_relations(LATER, DRIVER, KERNEL, SERIES)
    common = {"nvidia-kernel-common-580": {"Version": DRIVER}}
    index[f"linux-modules-nvidia-580-open-{KERNEL}"]["Depends"] = f"linux-image-{KERNEL}"
    index[f"linux-modules-nvidia-580-open-{SERIES}"].pop("Depends")
    apt("", fields(common | index) + DKMS)
    found = collect.read_archive("/none", simulate=True, installed=ON_SERIES)
    made = facts("ubuntu2404", ["5090"], kernel=KERNEL, secure_boot=True, **GDM)
    assert "apt would install dkms and nvidia-dkms-580-open" in refused(made | found, "cu132")


@pytest.mark.parametrize(
    ("line", "major"),
    [
        ("6.8.0-60-generic (buildd@lcy02) (x86_64-linux-gnu-gcc-12 (Ubuntu 12.3.0-1ubuntu1~22.04) "
         "12.3.0, GNU ld", "12"),
        ("4.15.0-213-generic (buildd@lcy02) (gcc version 7.5.0 (Ubuntu 7.5.0-3ubuntu1))", "7"),
        ("6.18.44 (builder@host) (clang version 19.1.0)", None),
    ],
)  # fmt: skip
def test_which_gcc_built_the_kernel(monkeypatch, line, major):
    monkeypatch.setattr(collect, "read", lambda path: f"Linux version {line}")
    assert collect.read_kernel_compiler() == major


def test_a_newer_kernel_waits_for_its_reboot(monkeypatch, tmp_path):
    monkeypatch.setattr(kernels, "BOOT", str(tmp_path))
    assert kernels.waiting_kernel("6.1.0-31-amd64") is None
    for release in ("6.1.0-9-amd64", "6.1.0-31-amd64", "6.1.0-50-amd64.old"):
        (tmp_path / f"vmlinuz-{release}").touch()
    assert kernels.waiting_kernel("6.1.0-31-amd64") is None
    (tmp_path / "vmlinuz-6.1.0-50-amd64").touch()
    assert kernels.waiting_kernel("6.1.0-31-amd64") == "6.1.0-50-amd64"


@pytest.mark.parametrize(
    ("first_line", "version"),
    [("580.126.20", "580.126.20"), ("1.0-10033 (440.33.01)", "440.33.01"), ("", "0")],
)
def test_the_installers_own_log_has_its_version(monkeypatch, first_line, version):
    monkeypatch.setattr(collect, "read", lambda path: f"{first_line}\nNVIDIA Accelerated ...")
    assert collect.read_runfile_version() == version
    monkeypatch.setattr(collect, "read", lambda path: None)
    assert collect.read_runfile_version() is None


@pytest.mark.parametrize(
    ("unit", "loaded", "active"),
    [
        ("display-manager.service", "not-found", "inactive"),
        ("gdm.service", "loaded", "inactive"),
    ],
)
def test_the_display_manager_by_its_own_name(says, unit, loaded, active):
    says("systemctl show", f"Id={unit}\nLoadState={loaded}\nActiveState={active}\n")
    assert collect.find_display_manager() == {
        "display_manager": unit if loaded == "loaded" else None,
        "display_manager_active": active == "active",
    }


# As loginctl of systemd 255 answers where anna sits at a KDE desktop, sddm shows its login screen
# on another seat, and ben has come by ssh.
LOGIND = {
    "2": "Id=2\nUser=1000\nName=anna\nSeat=seat0\nType=x11\nClass=user\nScope=session-2.scope\n",
    "c1": "Id=c1\nUser=116\nSeat=seat1\nType=wayland\nClass=greeter\nScope=session-c1.scope\n",
    "7": "Id=7\nUser=1001\nSeat=\nType=tty\nClass=user\nScope=session-7.scope\n",
    "8": "Id=8\nUser=1002\nName=bela\nSeat=seat0\nType=tty\nClass=user\nScope=session-8.scope\n",
}
ANNA = "0::/user.slice/user-1000.slice"
# pid: (program, control group, devices that it has open)
PROGRAMS = {
    "10": ("Xorg", "0::/system.slice/sddm.service", ["nvidia0"]),
    "11": ("kwin_x11", f"{ANNA}/session-2.scope", ["nvidiactl", "nvidia0"]),
    "12": ("gjs", f"{ANNA}/user@1000.service/app.slice/app-gnome.scope", ["nvidiactl"]),
    "13": ("sddm-greeter", "0::/user.slice/user-116.slice/session-c1.scope", ["nvidia0"]),
    "14": ("sddm-helper", "1:name=systemd:/system.slice/sddm.service", ["nvidiactl"]),
    "20": ("python3", f"{ANNA}/session-2.scope", ["nvidia0", "nvidia-uvm"]),
    "21": ("python3", "0::/user.slice/user-1001.slice/session-7.scope", ["nvidia0"]),
    "22": ("glxgears", "0::/user.slice/user-1002.slice/session-8.scope", ["nvidia0"]),
    "23": ("ollama", "0::/system.slice/ollama.service", ["nvidia0", "nvidia-uvm"]),
    "30": ("nvidia-persiste", "0::/system.slice/nvidia-persistenced.service", ["nvidia0"]),
    "32": ("nvidia-powerd", "0::/system.slice/nvidia-powerd.service", ["nvidia0", "nvidiactl"]),
    "31": ("bash", f"{ANNA}/session-2.scope", []),
}


def test_what_belongs_to_a_desktop_goes_with_it_and_what_computes_never_does(
    monkeypatch, tmp_path, says
):
    says("loginctl list-sessions", "".join(f"{name} 1000 anna seat0\n" for name in LOGIND))
    for name, shown in LOGIND.items():
        says(f"loginctl show-session {name}", shown)
    for pid, (command, group, devices) in PROGRAMS.items():
        (tmp_path / pid / "fd").mkdir(parents=True)
        (tmp_path / pid / "comm").write_text(f"{command}\n")
        (tmp_path / pid / "cgroup").write_text(f"{group}\n")
        for number, device in enumerate(devices):
            (tmp_path / pid / f"fd/{number}").symlink_to(f"/dev/{device}")
    monkeypatch.setattr(collect, "PROCESSES", f"{tmp_path}/[0-9]*")
    found = collect.list_processes("sddm.service")
    assert sorted(row["pid"] for row in found["displays"]) == [10, 11, 12, 13, 14]
    assert sorted(row["pid"] for row in found["gpu_processes"]) == [20, 21, 22, 23]
    assert found["seated"] == ["anna", "bela"]
