"""One report, two forms: Markdown for the repository, and a page of HTML that needs no other file."""

import base64
import html
import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Heading:
    text: str
    level: int = 2


@dataclass(frozen=True)
class Text:
    """A paragraph; `code`, *emphasis* and **bold** are marked as in Markdown."""

    text: str


@dataclass(frozen=True)
class Grid:
    """A table; a line break in a cell begins a new line."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Picture:
    """A drawing, on the page of HTML alone."""

    what: str
    svg: str


Block = Heading | Text | Grid | Picture


def to_markdown(blocks: Sequence[Block]) -> str:
    return "\n\n".join(filter(None, map(_markdown, blocks))) + "\n"


def _markdown(block: Block) -> str:
    match block:
        case Heading(text, level):
            return f"{'#' * level} {text}"
        case Text(text):
            return text
        case Grid(header, rows):
            lines = [header, ("---",) * len(header), *rows]
            return "\n".join("| " + " | ".join(_markdown_cell(cell) for cell in line) + " |" for line in lines)
        case Picture():
            return ""


def _markdown_cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", "<br>")


STYLE = """
:root { color-scheme: light }
body { font: 16px/1.5 system-ui, sans-serif; color: #1d2330; background: #fff; max-width: 74rem; margin: 2rem auto;
       padding: 0 1.2rem }
h1 { font-size: 1.9rem; margin-bottom: .4rem } h2 { margin-top: 2.6rem; border-bottom: 1px solid #d9dde6 }
p { max-width: 52rem }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .92rem }
th { text-align: left; border-bottom: 2px solid #8b93a7; padding: .35rem .8rem .35rem 0; vertical-align: bottom }
td { border-bottom: 1px solid #e6e9f0; padding: .35rem .8rem .35rem 0; vertical-align: top }
code { font-size: .8em; background: #f2f4f8; padding: .05rem .3rem; border-radius: .2rem }
td code { color: #5b6478 }
figure { margin: 1rem 0 } figure img { max-width: 100% } figcaption { color: #5b6478; font-size: .9rem }
"""


def to_html(blocks: Sequence[Block], title: str) -> str:
    body = "\n".join(map(_html, blocks))
    return (
        f'<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8"><title>{html.escape(title)}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<style>{STYLE}</style></head>\n'
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def _html(block: Block) -> str:
    match block:
        case Heading(text, level):
            return f"<h{level}>{_inline(text)}</h{level}>"
        case Text(text):
            return f"<p>{_inline(text)}</p>"
        case Grid(header, rows):
            head = "".join(f"<th>{_inline(cell)}</th>" for cell in header)
            body = "\n".join("<tr>" + "".join(f"<td>{_inline(cell)}</td>" for cell in row) + "</tr>" for row in rows)
            return f'<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>'
        case Picture(what, svg):
            data = base64.b64encode(svg.encode()).decode()
            source = f"data:image/svg+xml;base64,{data}"
            what = html.escape(what)
            return f'<figure><img alt="{what}" src="{source}"><figcaption>{what}</figcaption></figure>'


def _inline(text: str) -> str:
    """Code, bold and emphasis, which may hold code; within code, a star is a star."""
    escaped = html.escape(text, quote=False).replace("\n", "<br>")
    codes = iter(re.findall(r"`([^`]+)`", escaped))
    marked = _marked(re.sub(r"`[^`]+`", "\0", escaped))
    return re.sub("\0", lambda _: f"<code>{next(codes)}</code>", marked)


def _marked(text: str) -> str:
    text = re.sub(r"\*\*([^*]+)\*\*", r"<b>\1</b>", text)
    return re.sub(r"\*([^*]+)\*", r"<em>\1</em>", text)


def from_markdown(text: str) -> list[Block]:
    """Headings and paragraphs of a file written by hand."""
    blocks: list[Block] = []
    for part in filter(None, (part.strip() for part in re.split(r"\n\s*\n", text))):
        found = re.fullmatch(r"(#+) (.+)", part)
        unwrapped = re.sub(r"\n(?!- )", " ", part)  # a line break is the writer's, except before a list's next entry
        blocks.append(Heading(found[2], len(found[1])) if found else Text(unwrapped))
    return blocks
