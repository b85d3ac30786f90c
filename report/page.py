"""A view as one offline page: charts are inline SVG, and nothing is loaded from anywhere."""

from __future__ import annotations

import re
from pathlib import Path

import jinja2
from markupsafe import Markup, escape

from contract.records import CATEGORIES, DERIVED
from report import charts
from report.view import View


def render_page(view: View) -> str:
    """The HTML document, some 100 KB at most, however long the run was."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters.update(
        prose=prose, kind=lambda item: type(item).__name__, bars=charts.bars, curve=charts.curve
    )
    return environment.get_template("page.html.j2").render(
        view=view, categories={**CATEGORIES, **DERIVED}
    )


CODE = Markup("<code>{}</code>")


def prose(sentence: str) -> Markup:
    """Figures bound to their units by no-break spaces; what stands in backticks is code."""
    parts = bound(sentence).split("`")
    if len(parts) % 2 == 0:
        return escape(bound(sentence))
    marked = (CODE.format(part) if place % 2 else escape(part) for place, part in enumerate(parts))
    return Markup().join(marked)


def bound(sentence: str) -> str:
    units = r"%|ms|s|min|h|d|kB|MB|GB|MB/s|[GM]bit/s|(?:image|sample)s/s|px|MHz|W|C"
    return re.sub(rf"(?<=\d) (?=(?:{units})(?![\w/]))|(?<=<) (?=\d)", "\u00a0", sentence)
