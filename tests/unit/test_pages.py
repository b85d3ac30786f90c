"""The pages: each is reachable from README, and each link leads to something."""

import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\]\(([^)\s]+)\)")


def links(page):
    """The files that a page links to, outside of code."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
    targets = [target.partition("#")[0] for target in LINK.findall(text)]
    return [page.parent / one for one in targets if one and "://" not in one]


def pages():
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_every_link_leads_to_a_file():
    broken = [(page.name, str(one)) for page in pages() for one in links(page) if not one.exists()]
    assert broken == []


def test_every_page_is_reachable_from_readme():
    seen, todo = set(), [ROOT / "README.md"]
    while todo:
        page = todo.pop().resolve()
        if page not in seen and page.suffix == ".md":
            seen.add(page)
            todo += links(page)
    assert [page.name for page in pages() if page.resolve() not in seen] == []


def test_what_the_pages_say_to_type_are_verbs_and_variables_that_there_are():
    spec = importlib.util.spec_from_file_location("verbs", ROOT / "tools" / "verbs.py")
    verbs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(verbs)
    text = "\n".join(page.read_text() for page in pages())
    code = re.findall(r"^```.*?^```|`[^`\n]+`", text, re.DOTALL | re.MULTILINE)
    command = re.compile(r"^`?make ([a-z-]+)((?: [A-Z_]+=[^\s`]+)*)", re.MULTILINE)
    typed = [found for piece in code for found in command.findall(piece)]
    assert len(typed) > 50
    known = {name for name, verb in verbs.VERBS.items() if verb}
    for verb, rest in typed:
        assert verb in known, f"make {verb}"
        names = set(re.findall(r"([A-Z_]+)=", rest))
        assert names <= set(verbs.variables_of(verb)), f"make {verb}{rest}"
