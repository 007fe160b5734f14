"""Hooks of mkdocs.yml: the pages are written for GitHub, and this makes a site of them.

README.md becomes the first page, and other pages outside docs/ join it. A link to a file outside docs/ leads to a copy
of the file in the site; a link to a folder becomes its text.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from markdown import Markdown
from markdown.blockprocessors import ListIndentProcessor, OListProcessor, UListProcessor
from markdown.extensions import Extension
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pymdownx.slugs import slugify
from pymdownx.superfences import fence_code_format

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    **{name: name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")},
    "benchmarks/README.md": "measurements.md",
    "benchmarks/log.md": "performance-log-details.md",
    "benchmarks/faults.md": "faults.md",
    **{f"benchmarks/results/{path.name}": f"results-{path.name}" for path in ROOT.glob("benchmarks/results/*.md")},
}  # pages outside docs/, and their places in the site
COPIES = "files/"  # MkDocs leaves out a folder templates/
_FENCE = re.compile(r"^( *)```.*?^\1```", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")
_COMMENT = re.compile(r"^ *<!--.*?-->\n", re.DOTALL | re.MULTILINE)


class _TwoSpaces(Extension):
    """Reads lists with an indentation of two spaces, as GitHub does; code that is indented keeps its four."""

    def extendMarkdown(self, md: Markdown) -> None:
        md.tab_length = 2
        for name, kind, priority in (
            ("indent", ListIndentProcessor, 90),
            ("olist", OListProcessor, 40),
            ("ulist", UListProcessor, 30),
        ):
            md.parser.blockprocessors.register(kind(md.parser), name, priority)  # in place of the one with four
        md.tab_length = 4


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Give headings the anchors that GitHub gives them, and draw diagrams."""
    config.markdown_extensions.append(_TwoSpaces())
    config.mdx_configs["toc"] = {"slugify": slugify(case="lower"), "permalink": True}
    mermaid = {"name": "mermaid", "class": "mermaid", "format": fence_code_format}
    config.mdx_configs["pymdownx.superfences"] = {"custom_fences": [mermaid]}
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add pages of the root, and the files that any page links to."""
    sources = {f"docs/{file.src_uri}": Path(file.abs_src_path or "") for file in files.documentation_pages()}
    sources |= {name: ROOT / name for name in PAGES}
    for name, place in PAGES.items():
        files.append(File.generated(config, place, content=(ROOT / name).read_text(encoding="utf-8")))
    for source, path in sources.items():
        for _, link in _LINK.findall(_FENCE.sub("", path.read_text(encoding="utf-8"))):
            target = target_of(source, link)
            if target is None or not (ROOT / target).is_file():
                continue
            copy = site_path(target)
            if copy.startswith(COPIES) and copy not in files.src_uris:
                files.append(File.generated(config, copy, abs_src_path=str(ROOT / target)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the links of a page, remove comments, and let details contain Markdown."""
    source = {path: name for name, path in PAGES.items()}.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    parts, end = [], 0
    for fence in _FENCE.finditer(markdown):
        parts += [_with_links(markdown[end : fence.start()], source), fence[0]]
        end = fence.end()
    return "".join([*parts, _with_links(markdown[end:], source)])


def target_of(source: str, link: str) -> str | None:
    """Return the path in the repository to which a link of a page leads; None for URLs and headings of the page."""
    path = link.partition("#")[0]
    if not path or "://" in link or link.startswith("mailto:"):
        return None
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), path))


def site_path(target: str) -> str:
    """Return the place in the site of a file of the repository."""
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    return PAGES.get(target, f"{COPIES}{target}")


def _with_links(text: str, source: str) -> str:
    def rewritten(match: re.Match[str]) -> str:
        label, link = match.groups()
        target = target_of(source, link)
        if target is None:
            return match[0]
        if (ROOT / target).is_dir():
            return label
        _, hash_sign, anchor = link.partition("#")
        place = posixpath.relpath(site_path(target), posixpath.dirname(site_path(source)) or ".")
        return f"[{label}]({place}{hash_sign}{anchor})"

    text = _COMMENT.sub("", _LINK.sub(rewritten, text))
    return text.replace("<details>", '<details markdown="1">').replace("<summary>", '<summary markdown="span">')
