"""Markdown tables, and Markdown as one page of HTML that needs no other file."""

import base64
import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

STYLE = """
:root { color-scheme: light }
body { font: 16px/1.5 system-ui, sans-serif; color: #1d2330; background: #fff; max-width: 74rem; margin: 2rem auto;
       padding: 0 1.2rem }
h1 { font-size: 1.9rem; margin: 3rem 0 .4rem } h2 { margin-top: 2.6rem; border-bottom: 1px solid #d9dde6 }
p, li { max-width: 52rem }
table { display: block; overflow-x: auto; border-collapse: collapse; font-variant-numeric: tabular-nums;
        font-size: .92rem }
th { text-align: left; border-bottom: 2px solid #8b93a7; padding: .35rem .8rem .35rem 0; vertical-align: bottom }
td { border-bottom: 1px solid #e6e9f0; padding: .35rem .8rem .35rem 0; vertical-align: top }
code { font-size: .8em; background: #f2f4f8; padding: .05rem .3rem; border-radius: .2rem }
td code { color: #5b6478 }
img { max-width: 100% }
"""


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; a line break in a cell stays one."""
    lines = [[text.replace("|", "\\|").replace("\n", "<br>") for text in line] for line in (header, *rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (lines[0], ["---"] * len(header), *lines[1:]))


def paragraphs(*parts: str) -> str:
    """Parts with an empty line between them; empty ones are left out."""
    return "\n\n".join(filter(None, parts)) + "\n"


def value_text(value: Any) -> str:
    """A setting's value for people."""
    if isinstance(value, (tuple, list)):
        return "+".join(map(str, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else f"{value}"


def settings_text(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value_text(value)}" for name, value in settings.items())


def to_html(text: str, title: str, pictures: Mapping[str, str]) -> str:
    """A page with a table of contents in which pictures, SVG by file name, are embedded."""
    import markdown  # type: ignore[import-untyped]  # deferred: for this page only

    options = {"toc": {"toc_depth": "1-2"}}
    body = markdown.markdown(f"[TOC]\n\n{text}", extensions=["tables", "toc", "fenced_code"], extension_configs=options)
    for name, svg in pictures.items():
        data = base64.b64encode(svg.encode()).decode()
        body = body.replace(f'src="{name}"', f'src="data:image/svg+xml;base64,{data}"')
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{html.escape(title)}</title>\n'
        f"<style>{STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )
