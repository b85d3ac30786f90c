"""Requirements files: each line is understood completely or rejected; uv reads what we wrote."""

import codecs
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import tomllib
from hypothesis import assume, example, given
from hypothesis import strategies as st
from packaging.requirements import Requirement

from contract.errors import UserError
from launcher.plan import layer, pip_settings
from launcher.plan.layer import Environment
from launcher.plan.requirements import find_requirements, read_requirements
from tests.fuzz import many

ENVIRONMENT = Environment.from_facts("3.11.2", 36, {"torch": "2.15.0"})


@pytest.fixture
def write(tmp_path):
    """write("tool", "part==0.5") -> the path of a requirements.txt."""

    def write(*lines):
        path = tmp_path / "requirements.txt"
        path.write_text("".join(f"{line}\n" for line in lines))
        return path

    return write


def names(packages):
    return [package.name for package in packages]


def test_a_change_of_a_file_that_is_included_is_seen(write, tmp_path):
    """But one that asks for nothing else, such as a comment, makes no new layer."""
    base, limits = tmp_path / "more/base.txt", tmp_path / "more/limits.txt"
    base.parent.mkdir()
    base.write_text("part\n-climits.txt  # beside it\n-r ../requirements.txt\n")
    limits.write_text("native==1.0\n")
    path = write("# --requirement none.txt", "--requirement=more/base.txt")
    keys = [layer.layer_key(read_requirements(path), ENVIRONMENT)]
    for changed, text in (
        (limits, "native<2\n"),
        (base, "tool\n"),
        (base, "tool # it\n"),
        (base, "tool\n--pre\n"),
    ):
        changed.write_text(text)
        keys.append(layer.layer_key(read_requirements(path), ENVIRONMENT))
    assert len(set(keys)) == 4 and keys[2] == keys[3]


def test_constraints_are_no_packages_to_install(write, tmp_path):
    (tmp_path / "limits.txt").write_text("part<1\n-r base.txt\n")
    (tmp_path / "base.txt").write_text("Base_X[b,A]>=1,<2 ; python_version > '3'\n")
    found = read_requirements(write("tool", "-c limits.txt"))
    assert names(found.packages) == ["tool", "base-x"]  # of -r, wherever it is, as with pip
    assert [package.line() for package in found.constraints] == ["part<1"]
    assert found.packages[1].line() == 'base-x[a,b]<2,>=1; python_version > "3"'


@pytest.mark.parametrize(
    "content",
    [
        codecs.BOM_UTF8 + "# é\ntool".encode(),
        codecs.BOM_UTF16_BE + "# é\ntool".encode("utf-16-be"),
        "tool  # é".encode("utf-32"),
        "# -*- coding: gbk -*-\n# 训练\ntool".encode("gbk"),
        b"# a\n# vim: set fileencoding=latin-1 :\ntool # \xe9",
    ],
)
def test_a_file_is_decoded_as_pip_decodes_it(tmp_path, content):
    path = tmp_path / "requirements.txt"
    path.write_bytes(content)
    assert names(read_requirements(path).packages) == ["tool"]


@pytest.mark.parametrize("content", [b"\xff", b"# coding: none-such\na", b"\xff\xfea"])
def test_a_file_of_no_text_is_an_error_with_its_name(tmp_path, content):
    path = tmp_path / "requirements.txt"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"requirements\.txt cannot be read"):
        read_requirements(path)


UNUSABLE = [
    "attrs @ file:///croot/attrs_1729089401488/work",
    "tool.whl ; python_version > '3'",
    "tool @ http://192.0.2.1/tool-1.0-py3-none-any.whl",
    "tool @ https://192.0.2.1/tool-1.0.tar.gz",
    "git+https://192.0.2.1/tool",
    "-e .",
    "--no-binary :none:",
    "--require-hashes",
    "--index-url https://192.0.2.1/${TOKEN}",
    "--index-url simple",
    "--pre tool",
    "-r more.txt --pre",
    "-c https://192.0.2.1/limits.txt",
    "-r 'a",
    "tool --hash=md5:" + "0" * 32,
    "tool --pre",
    "tool===1.0",
    "tool part",
    "tóol",
    "tool; python_version > 'a' and " + "(" * 5000,
]


def test_one_message_has_all_lines_that_cannot_be_used(write, tmp_path):
    (tmp_path / "more.txt").write_text("--find-links https://me:secret@192.0.2.1 x\n")
    with pytest.raises(UserError) as refused:
        read_requirements(write("good", *UNUSABLE, "-r more.txt"))
    message = str(refused.value)
    assert [line for line in UNUSABLE if line[:100] not in message] == []
    assert "more.txt)" in message and "good" not in message and "secret" not in message


def test_the_files_that_are_included_are_bounded(write, tmp_path):
    for number in range(64):
        (tmp_path / f"{number}.txt").write_text(f"-r {number + 1}.txt\n")
    (tmp_path / "64.txt").write_text("")
    with pytest.raises(UserError, match="more than 64 files or 10,000 lines"):
        read_requirements(write("-r 0.txt"))
    with pytest.raises(UserError, match=r"none.txt cannot be read: No such file or directory\."):
        read_requirements(write("-r none.txt"))


def test_no_line_of_another_file_is_taken_for_a_package(write, tmp_path):
    """A project may include a token of its reader, whose index would then be asked for it."""
    (tmp_path / "token").write_text("hf_secret\n")
    project = tmp_path / "project"
    project.mkdir()
    (project / "more.txt").symlink_to("../token")
    (project / "base").write_text("part\n")
    (tmp_path / "shared.in").write_text("tool\n")
    for line in ("-r ../token", "-c more.txt", "-r /proc/self/environ"):
        (project / "requirements.txt").write_text(line)
        with pytest.raises(UserError, match=r"does not end in \.txt") as refused:
            read_requirements(project / "requirements.txt")
        assert "hf_secret" not in str(refused.value)
    (project / "requirements.txt").write_text("-r base\n-r ../shared.in\n")
    assert names(read_requirements(project / "requirements.txt").packages) == ["part", "tool"]


USED = [
    "tool", "part==0.5", "a_b[x,Y]>=1,<2", 'm; sys_platform == "linux"', "v~=1.2  # because",
    "u @ https://192.0.2.1/a%20b/u-1.0-py3-none-any.whl ; os_name != 'nt'",
    "h==1 --hash=sha256:" + "0" * 64, "--pre", "--no-index", "-f wheels", "--only-binary :all:",
    "# é", "",
]  # fmt: skip
NOT_USED = [
    "--no-binary tool", "--no-binary=:all:", "--only-binary :none:", "-e .", "./evil", "-r",
    "evil @ git+https://192.0.2.1/evil", "evil-1.0.tar.gz",
]  # fmt: skip
LINE_ENDS = [
    "\n", "\r\n", "\r", "\f", "\v", "\x1c", "\x85", "\u2028", "\u2029", " # \\\n", "\t#\\\r",
    " # \\\u2028",
]  # fmt: skip
OTHER_ENDS = ["\\\n", "\\\r\n", " \\\n", "\\ \n", "\n \\\n", "#\\\n", " ", "\ufeff", "\0"]
ENCODINGS = ["utf-8", "utf-8-sig", "utf-16", "utf-32"]


@many(160)
@example([("# é", " # \\\n"), ("--no-binary tool", "\n")], "utf-8-sig")
@example([("tool", " # \\\n"), ("part==0.5", "\n")], "utf-8")
@given(
    st.lists(
        st.tuples(
            st.sampled_from(USED * 2 + NOT_USED), st.sampled_from(LINE_ENDS * 3 + OTHER_ENDS)
        ),
        max_size=6,
    ),
    st.sampled_from(ENCODINGS),
)
def test_uv_reads_in_what_we_wrote_what_we_have_read(pieces, encoding):
    """`uv add` shows how uv reads a file. No line is left out, and no option builds a source."""
    text = "".join(line + end for line, end in pieces)
    is_clear = all(end in LINE_ENDS for _, end in pieces)
    is_usable = not any(line in NOT_USED for line, _ in pieces)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "requirements.txt").write_bytes(text.encode(encoding))
        try:
            found = read_requirements(folder / "requirements.txt")
        except UserError:
            assert not (is_clear and is_usable)
            return
        assert is_usable or not is_clear
        assume(len(found.packages) == len(set(names(found.packages))))  # uv add joins the others
        layer.write_packages(folder / "asked.txt", found.packages)
        written = (folder / "asked.txt").read_text().splitlines()
        assert len(written) == len(found.packages) and not any(w.startswith("-") for w in written)
        settings = pip_settings.uv_settings(found.options)
        assert not any("bin" in key or "build" in key for key in tomllib.loads(settings))
        (folder / "pyproject.toml").write_text("[project]\nname = 'p'\nversion = '0'\n")
        uv = str(Path(sys.executable).with_name("uv"))
        argv = [uv, "--offline", "--no-config", "add", "--frozen", "--raw", "-r", "asked.txt"]
        done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=False)
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        read_by_uv = {Requirement(text) for text in project.get("dependencies", [])}
        assert read_by_uv == {package.requirement for package in found.packages}, done.stderr


def test_the_file_beside_the_script_is_found_and_another_can_be_named(tmp_path):
    inner = tmp_path / "tools"
    inner.mkdir()
    assert find_requirements([inner, tmp_path], None) is None
    (tmp_path / "requirements.txt").write_text("")
    assert find_requirements([inner, tmp_path], None) == tmp_path / "requirements.txt"
    (tmp_path / "more.txt").write_text("")
    assert find_requirements([inner], str(tmp_path / "more.txt")) == tmp_path / "more.txt"
    with pytest.raises(UserError, match="there is no file"):
        find_requirements([inner], str(tmp_path / "none.txt"))


def test_uv_gets_the_settings_of_pip_before_any_package_is_there(tmp_path):
    """Of several places the last counts, in pip's order; another index replaces those before."""
    for folder, text in (
        ("etc/pip", "[global]\nindex-url = https://a/\ntrusted_host = a\n  b:8080\n"),
        (".pip", "[install]\nfind-links = ~/wheels /other\n"),
        (".config/pip", "[global]\nextra-index-url = https://b/\nno-index = off\nfind-links = x\n"),
    ):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "pip.conf").write_text(text)
    variables = {"HOME": str(tmp_path), "XDG_CONFIG_DIRS": str(tmp_path / "etc")}
    variables["PIP_EXTRA_INDEX_URL"] = "https://c/ https://d/"
    variables |= {"PIP_CERT": "/etc/lab.pem", "PIP_DEFAULT_TIMEOUT": "180"}
    uv = ["/bin/sh", "-c", 'echo "#" $SSL_CERT_FILE $UV_HTTP_TIMEOUT; cat "$UV_CONFIG_FILE"']
    argv = [sys.executable, "-S", "-m", "launcher.plan.pip_settings", tmp_path, *uv]
    printed = subprocess.run(argv, env=variables, capture_output=True, text=True, check=True).stdout
    assert printed.startswith("# /etc/lab.pem 180\n")
    found = tomllib.loads(printed)
    assert (found["index-url"], found["no-index"]) == ("https://a/", False)
    assert found["extra-index-url"] == ["https://c/", "https://d/"]
    assert found["find-links"] == [str(tmp_path / "wheels"), "/other"]
    assert found["allow-insecure-host"] == ["a", "b:8080"]
    own = [("extra-index-url", "https://b/"), ("index-url", "https://e/"), ("pre", "")]
    merged = tomllib.loads(pip_settings.uv_settings([*own, ("extra-index-url", "https://f/")]))
    assert (merged["index-url"], merged["extra-index-url"]) == ("https://e/", ["https://f/"])
    assert merged["prerelease"] == "allow"
