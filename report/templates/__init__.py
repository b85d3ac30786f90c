"""The pages' templates, and how they are filled."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jinja2

from report.units import link, percent, seconds, size, three_digits


def render(template: str, **values: Any) -> str:
    """The HTML document."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters.update(
        seconds=seconds, size=size, percent=percent, link=link, digits=three_digits, bound=bound
    )
    return environment.get_template(template).render(**values)


def bound(sentence: str) -> str:
    """The sentence with its figures bound to their units by no-break spaces."""
    units = r"%|ms|s|min|h|d|kB|MB|GB|MB/s|[GM]bit/s|images/s|px|MHz|W|C"
    return re.sub(rf"(?<=\d) (?=(?:{units})(?![\w/]))|(?<=<) (?=\d)", "\u00a0", sentence)
