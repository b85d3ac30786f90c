"""Writes each role's README.md from its meta/argument_specs.yml; run it after changing one."""

from pathlib import Path

import yaml

ROLES = Path(__file__).resolve().parent / "roles"


def readme(role):
    """The text of the README.md of a role in this folder."""
    specs = yaml.safe_load((role / "meta/argument_specs.yml").read_text())["argument_specs"]
    parts = [f"# {role.name}", f"{specs['main']['short_description']}."]
    for entry, spec in specs.items():
        parts.append(f"## `tasks/{entry}.yml`")
        parts.append("\n".join(f"- {plain(line)}" for line in listed(spec["description"])))
        if spec.get("options"):
            parts.append(table(spec["options"]))
    parts.append("*Written from `meta/argument_specs.yml` by `python ansible/role_readmes.py`.*")
    return "\n\n".join(parts) + "\n"


def table(options):
    lines = ["| variable | type | default | what |", "|---|---|---|---|"]
    for name, option in options.items():
        kind = option.get("type", "str")
        if "choices" in option:
            kind += ": " + ", ".join(f"`{choice}`" for choice in option["choices"])
        what = " ".join(plain(line) for line in listed(option["description"]))
        lines.append(f"| `{name}` | {kind} | {default(option)} | {what} |")
    return "\n".join(lines)


def default(option):
    if option.get("required"):
        return "group_vars/all.yml"
    return f"`{option['default']}`" if "default" in option else "defaults/main.yml"


def listed(value):
    return value if isinstance(value, list) else [value]


def plain(text):
    """Ansible's C(code) and I(variable) in Markdown."""
    for mark in ("C(", "I("):
        head, *rest = text.split(mark)
        text = head + "".join("`" + part.replace(")", "`", 1) for part in rest)
    return text.rstrip()


def roles():
    return sorted(path.parent.parent for path in ROLES.glob("*/meta/argument_specs.yml"))


if __name__ == "__main__":
    for folder in roles():
        (folder / "README.md").write_text(readme(folder))
