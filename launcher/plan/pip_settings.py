"""Reads pip's settings for uv, because uv reads neither pip's files nor pip's variables.

layer.py takes the settings from here. tools/venv.sh runs `python3 -m launcher.plan.pip_settings
FOLDER uv ...` before any package is installed, so this module needs only the standard library.
"""

from __future__ import annotations

import configparser
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from contract.errors import UserError

LISTS = ("index-url", "extra-index-url", "find-links", "trusted-host")
TRUE = ("1", "true", "t", "yes", "y", "on")


def read_pip_settings() -> dict[str, str]:
    """Return the settings of `pip install`, from pip's files and from its variables PIP_*, which
    override the files. Raises UserError."""
    home, named_file = os.environ.get("HOME", ""), os.environ.get("PIP_CONFIG_FILE", "")
    folders = [f"{path}/pip" for path in os.environ.get("XDG_CONFIG_DIRS", "/etc/xdg").split(":")]
    folders.append("/etc")
    # A file that PIP_CONFIG_FILE names replaces the user's files.
    if not (named_file and Path(named_file).exists()):
        folders += [f"{home}/.pip", f"{os.environ.get('XDG_CONFIG_HOME') or f'{home}/.config'}/pip"]
    # Each file overrides the ones before it, in pip's order.
    files = [f"{folder}/pip.conf" for folder in (*folders, sys.prefix)] + [named_file]
    parser = configparser.RawConfigParser()
    try:
        parser.read([] if named_file == os.devnull else files, encoding="utf-8")
    except (configparser.Error, ValueError) as error:
        raise UserError(f"pip's settings cannot be read: {error}. Correct that file.") from None
    sections = [parser.items(name) for name in ("global", "install") if parser.has_section(name)]
    variables = [(k[len("PIP_") :], v) for k, v in os.environ.items() if k.startswith("PIP_")]
    pairs = [pair for section in (*sections, variables) for pair in section]
    return {name.lower().replace("_", "-"): value for name, value in pairs if value}


def pip_options(settings: dict[str, str]) -> list[tuple[str, str]]:
    """Return pip's options for the sources of packages, from these settings."""
    values = {name: settings.get(name, "").split() for name in LISTS}
    values["find-links"] = [absolute(place, Path()) for place in values["find-links"]]
    values["no-index"] = [""] if settings.get("no-index", "").lower() in TRUE else []
    return [(name, value) for name, texts in values.items() for value in texts]


def absolute(place: str, folder: Path) -> str:
    """Return `place` unchanged if it is an address, and otherwise as an absolute path: a relative
    path begins at `folder`. Raises RuntimeError if the home of a path with ~ does not exist."""
    return place if "://" in place else str((folder / Path(place).expanduser()).absolute())


def uv_settings(options: Iterable[tuple[str, str]]) -> str:
    """Return a uv.toml for these options of pip, which are in the order in which pip reads them."""
    # A command line would not do: all users of a PC can read it, and addresses may have passwords.
    names = {name for name, _ in options}
    indexes = ["https://pypi.org/simple"]
    for name, value in options:
        if name == "index-url":  # in pip it replaces all previous indexes
            indexes = [value]
        elif name == "extra-index-url":
            indexes.append(value)
    settings = {
        "index-url": indexes[0],
        "extra-index-url": indexes[1:],
        "index-strategy": "unsafe-best-match",  # the best version of all indexes, as with pip
        "find-links": [value for name, value in options if name == "find-links"],
        "allow-insecure-host": [value for name, value in options if name == "trusted-host"],
        "no-index": "no-index" in names,
        "prerelease": "allow" if "pre" in names else "if-necessary-or-explicit",
    }
    # TOML and JSON write strings, lists and booleans in the same way.
    return "".join(f"{k} = {json.dumps(v, ensure_ascii=False)}\n" for k, v in settings.items())


# Variables of uv and of its TLS library, with the settings of pip that have the same meaning.
VARIABLES = {
    "SSL_CERT_FILE": "cert",
    "SSL_CLIENT_CERT": "client-cert",
    "ALL_PROXY": "proxy",
    "UV_HTTP_TIMEOUT": "default-timeout",
}


def run_uv(folder: Path, words: list[str]) -> int:
    """Run uv with pip's settings, which go into a file in `folder`, and return its exit code.
    Raises UserError, and OSError if uv cannot be started."""
    settings = read_pip_settings()
    config = folder / "uv.toml"
    config.write_text(uv_settings(pip_options(settings)), encoding="utf-8")
    variables = {name: settings[key] for name, key in VARIABLES.items() if key in settings}
    env = {**os.environ, **variables, "UV_CONFIG_FILE": str(config)}
    return subprocess.run(words, env=env, check=False).returncode


if __name__ == "__main__":
    try:
        sys.exit(run_uv(Path(sys.argv[1]), sys.argv[2:]))
    except (UserError, OSError) as error:
        sys.exit(f"tandem: {error}")
