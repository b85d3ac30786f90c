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


def test_every_test_that_a_page_names_is_there():
    rooms = (ROOT / "tests", ROOT / "bench")
    there = {path.name for room in rooms for path in room.rglob("test_*.py")}
    named = {
        (page.name, name)
        for page in pages()
        for name in re.findall(r"\btest_\w+\.py\b", page.read_text())
    }
    assert {one for one in named if one[1] not in there} == set()


def blocks(page):
    """Paragraphs and items, without code and tables: how many words each may have, and it."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    lines = [line for line in text.splitlines() if not line.startswith(("|", "#"))]
    begins = r"(?=^\s*(?:[-*]|\d+\.) )"
    for paragraph in re.split(r"\n\s*\n", "\n".join(lines)):
        for block in re.split(begins, paragraph, flags=re.MULTILINE):
            yield (60 if re.match(begins, block) else 120), block


def test_no_paragraph_or_item_is_too_long_to_be_read():
    long = [
        f"{page.name}: {len(block.split())} words: {' '.join(block.split())[:60]}"
        for page in pages()
        for most, block in blocks(page)
        if len(block.split()) > most
    ]
    assert long == []


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
