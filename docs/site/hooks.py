"""Pages of the documentation site that are made while it is built, and links that lead out of `docs/`.

The site shows what the repository holds: results of benchmarks, the changelog, CONTRIBUTING and the notebooks are taken
as they are; pages of the API and of the commands are made from docstrings and from click.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(Path(__file__).parent))

import api  # noqa: E402  # this folder is no package
import commands  # noqa: E402

_LINK = re.compile(r"\]\(((?:\.\./|docs/|tutorials/)[^)\s]+)\)")
_MOVED = (
    (re.compile(r"(?:\.\./)+benchmarks/results/"), "benchmarks/"),
    (re.compile(r"(?:\.\./)+CHANGELOG\.md"), "changelog.md"),
    (re.compile(r"(?:\.\./)+CONTRIBUTING\.md"), "contributing.md"),
    (re.compile(r"docs/"), ""),  # in what lies beside docs/
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that do not lie in `docs/`."""
    pages = {f"benchmarks/{path.name}": path.read_text() for path in sorted((ROOT / "benchmarks/results").glob("*.md"))}
    pages["benchmarks/index.md"] = _results_index()
    pages["changelog.md"] = (ROOT / "CHANGELOG.md").read_text()
    pages["contributing.md"] = (ROOT / "CONTRIBUTING.md").read_text()
    pages["reference/cli.md"] = commands.page()
    pages |= {f"reference/api/{name}.md": api.page(name) for name in api.PAGES}
    pages |= {
        f"tutorials/{path.stem}.md": _notebook(path) for path in sorted((ROOT / "docs/tutorials").glob("*.ipynb"))
    }
    for address, text in pages.items():
        files.append(File.generated(config, address, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to files of the repository to the page that shows them, else to the repository."""
    depth = page.file.src_uri.count("/")
    return _LINK.sub(lambda link: f"]({_address(link.group(1), page, depth, config)})", markdown)


def _address(link: str, page: Page, depth: int, config: MkDocsConfig) -> str:
    link = link.replace(".ipynb", ".md")
    for pattern, place in _MOVED:
        if pattern.match(link):
            return "../" * depth + pattern.sub(place, link)
    path, _, anchor = link.partition("#")
    target = (ROOT / "docs" / Path(page.file.src_uri).parent / path).resolve()
    if (ROOT / "docs") in target.parents or not target.exists():
        return link
    return f"{config.repo_url}/blob/main/{target.relative_to(ROOT)}{'#' + anchor if anchor else ''}"


def _results_index() -> str:
    lines = ["# Benchmarks", "", "Each page says how it was measured, on which machine, and beside what.", ""]
    for path in sorted((ROOT / "benchmarks/results").glob("*.md")):
        title = path.read_text().partition("\n")[0].removeprefix("# ")
        lines.append(f"- [{title}]({path.name})")
    return "\n".join(lines) + "\n"


def _notebook(path: Path) -> str:
    """Return the cells of a notebook as Markdown, with what they printed."""
    parts: list[str] = []
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        printed = "".join(_text(output) for output in cell["outputs"])
        if printed.strip():
            parts.append(f"```text\n{printed.rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def _text(output: dict[str, Any]) -> str:
    text = output.get("text") or output.get("data", {}).get("text/plain", "")
    return "".join(text)
