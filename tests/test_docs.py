"""The documentation: Python blocks run, links lead somewhere, the API page is up to date."""

import re
import runpy
from pathlib import Path

import pytest

import pallas_pool as pp

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [
    path
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md")))
    if path.exists()
]
# A fence may be indented, inside a list.
BLOCK = re.compile(r"^( *)```(.*)\n((?:.*\n)*?)\1```$", re.MULTILINE)
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
# A file of the project, named in the text.
FILE = re.compile(r"`((?:bench|docs|pallas_pool|reference|tests)/[\w./]+)`")

FLAG = re.compile(r"(?<![\w-])--(?:no)?([a-z]\w*)")


def named(path):
    return str(path.relative_to(ROOT))


def blocks(path, language):
    """The code of a page's blocks in that language, each on its lines of the page."""
    text = path.read_text()
    for match in BLOCK.finditer(text):
        if match[2] == language:
            before = text.count("\n", 0, match.start(3))
            yield "\n" * before + re.sub(f"^{match[1]}", "", match[3], flags=re.MULTILINE)


@pytest.mark.parametrize("path", [p for p in PAGES if list(blocks(p, "python"))], ids=named)
def test_python_blocks_run(path, tmp_path, monkeypatch):
    """In order, in one namespace, in an empty folder; a traceback shows the page and its line."""
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    for code in blocks(path, "python"):
        exec(compile(code, str(path), "exec"), namespace)


@pytest.mark.parametrize("path", PAGES, ids=named)
def test_every_block_says_what_it_is(path):
    """So that no Python escapes the test above under another name."""
    text = path.read_text()
    languages = [match[2] for match in BLOCK.finditer(text)]
    assert text.count("```") == 2 * len(languages)
    known = {"python", "sh", "text", "mermaid"}
    # A figure may do without, as long as it holds no code.
    bare = [code for code in blocks(path, "") if re.search(r"^(import|from|def) ", code, re.M)]
    assert set(languages) <= known | {""} and not bare


@pytest.mark.parametrize("path", PAGES, ids=named)
def test_links_and_files_exist(path):
    text = path.read_text()
    for target in LINK.findall(text):
        if "://" not in target:
            assert (path.parent / target).exists(), target
    for target in FILE.findall(text):
        assert (ROOT / target).exists(), target


@pytest.mark.parametrize("path", PAGES, ids=named)
def test_flags_exist(path):
    """Those of the commands and those in the text; they are the benchmark's, but for absl's own."""
    sources = "".join(source.read_text() for source in (ROOT / "bench").glob("*.py"))
    for flag in set(FLAG.findall(path.read_text())) - {"helpshort"}:
        assert f'"{flag}"' in sources, flag


def test_every_page_can_be_found():
    """From the README by way of the list of pages."""
    listed = set(LINK.findall((DOCS / "README.md").read_text()))
    assert {path.name for path in DOCS.glob("*.md")} - {"README.md"} <= listed
    if (ROOT / "README.md").exists():
        assert "docs/" in (ROOT / "README.md").read_text()


def test_the_api_page_is_up_to_date():
    script = runpy.run_path(str(DOCS / "make_api.py"))
    assert (DOCS / "api.md").read_text() == script["render"](), "run `python docs/make_api.py`"


def test_the_api_page_has_every_public_name():
    text = (DOCS / "api.md").read_text()
    for name in pp.__all__:
        assert name.startswith("_") or f"\n## {name}\n" in text, name
