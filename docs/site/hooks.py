"""Makes the site of pages as they are: written for GitHub, of files inside docs/ and outside, and of notebooks.

Pages from elsewhere get a place in the site; relative links are turned to that place or, where a file is no page, to
the repository. Notebooks become pages with their outputs. MkDocs calls these functions by their names.
"""

import base64
import json
import posixpath
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
REPOSITORY = "https://github.com/fastweights/fastweights/blob/main/"
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "benchmarks/README.md": "speed.md",
    "results/README.md": "results/index.md",
    "results/omniglot.md": "results/omniglot.md",
    "results/mini-imagenet.md": "results/mini-imagenet.md",
    "results/ptb.md": "results/ptb.md",
    "results/recipes.md": "results/recipes.md",
    "src/fastweights/classifier/shipped/drawings.md": "models/drawings.md",
    "src/fastweights/classifier/shipped/photos.md": "models/photos.md",
    "notebooks/first_steps.ipynb": "notebooks/first_steps.md",
    "notebooks/inside_the_memory.ipynb": "notebooks/inside_the_memory.md",
    "notebooks/your_own_method.ipynb": "notebooks/your_own_method.md",
}
"""Where in the site files from outside docs/ are. README.md is for the repository; the site has its own first page."""
ASSETS = ("results/*.svg", "results/*.png", "results/*.csv")
LINK = re.compile(r"(\]\()([^)\s]+)(\))")
FENCE = re.compile(r"^```.*?^```", re.M | re.S)
Output = dict[str, Any]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, place in PAGES.items():
        if files.get_file_from_path(place) is not None or not (ROOT / source).exists():
            continue
        if source.endswith(".ipynb"):
            text, pictures = as_page(json.loads((ROOT / source).read_text(encoding="utf-8")), Path(place).stem)
            for name, content in pictures.items():
                files.append(File.generated(config, f"notebooks/{name}", content=content))
        else:
            text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, place, content=text))
    for pattern in ASSETS:
        for path in sorted(ROOT.glob(pattern)):
            files.append(File.generated(config, path.relative_to(ROOT).as_posix(), content=path.read_bytes()))
    return files


def commands_page() -> str:
    return str(runpy.run_path(str(Path(__file__).with_name("commands.py")))["page"]())


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    place = page.file.src_uri
    if place == "reference/commands.md":
        markdown += commands_page()
    source = {there: here for here, there in PAGES.items() if there != "index.md"}.get(place, f"docs/{place}")
    at = 0
    parts = []
    for fence in FENCE.finditer(markdown):  # what looks like a link in code is none
        parts += [turned(markdown[at : fence.start()], source, place, files), fence[0]]
        at = fence.end()
    return "".join([*parts, turned(markdown[at:], source, place, files)])


def turned(text: str, source: str, place: str, files: Files) -> str:
    """The text of a page, written at `source` of the repository, with links that work at `place` of the site."""

    def turn(link: re.Match[str]) -> str:
        path, hash_mark, anchor = link[2].partition("#")
        if not path or ":" in path:
            return link[0]
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        there = PAGES.get(target, target.removeprefix("docs/"))
        if files.get_file_from_path(there) is not None:
            return f"{link[1]}{posixpath.relpath(there, posixpath.dirname(place) or '.')}{hash_mark}{anchor}{link[3]}"
        if (ROOT / target).exists():
            return f"{link[1]}{REPOSITORY}{target}{hash_mark}{anchor}{link[3]}"
        return link[0]  # MkDocs says that there is no such page

    return LINK.sub(turn, text)


def as_page(notebook: dict[str, Any], name: str) -> tuple[str, dict[str, bytes]]:
    """A notebook as Markdown, and its pictures by file name."""
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(text)
            continue
        parts.append(f"```python\n{text}\n```")
        for output in cell["outputs"]:
            for kind, content in shown(output):
                if kind == "text":
                    parts.append(f"```text\n{content}\n```")
                else:
                    file = f"{name}-{len(pictures) + 1}.png"
                    pictures[file] = base64.b64decode(content)
                    parts.append(f"![What the code above draws]({file})")
    return "\n\n".join(parts) + "\n", pictures


def shown(output: Output) -> Iterator[tuple[str, str]]:
    """What a cell printed, returned or drew: its kind and content."""
    if output["output_type"] == "stream":
        yield "text", "".join(output["text"]).rstrip()
    elif "image/png" in output.get("data", {}):
        yield "picture", "".join(output["data"]["image/png"])
    elif "text/plain" in output.get("data", {}):
        yield "text", "".join(output["data"]["text/plain"]).rstrip()
