"""The README and the pages stay short enough to be read."""

import re

from .markdown_pages import ROOT

MOST = 18_000

GENERATED = {"model_types.md"}
"""Pages that a command writes."""


def words_of(page):
    """Count the words that somebody wrote for a page's readers.

    Left out are code blocks, tables that a command writes between two marks, comments, addresses of links, signs
    without a letter or digit, and the messages of the code that ``reasons.md`` has in first columns.
    """
    page = re.sub(r"<!-- ([\w.-]+)(?::[^>]*)? -->.*?<!-- end of \1 -->", "", page, flags=re.DOTALL)
    page = re.sub(r"^( *)```.*?^\1```$", "", page, flags=re.DOTALL | re.MULTILINE)
    page = re.sub(r"<!--.*?-->", "", page, flags=re.DOTALL)
    page = re.sub(r"\]\([^)]*\)", "]", page)
    return sum(bool(re.search(r"\w", word)) for word in page.split())


def test_pages_have_no_more_words_than_a_reader_has_patience_for():
    pages = {path.name: path.read_text(encoding="utf-8") for path in [ROOT / "README.md", *ROOT.glob("docs/*.md")]}
    pages["reasons.md"] = re.sub(r"^\| ``? ?.+? ?``? \|", "|", pages["reasons.md"], flags=re.MULTILINE)
    words = {name: words_of(page) for name, page in pages.items() if name not in GENERATED}
    assert sum(words.values()) <= MOST, words


def test_what_somebody_wrote_is_counted():
    code, table = "```python\nx = 1\n```\n", "<!-- t: by x -->\n| a | 1 |\n<!-- end of t -->\n"
    assert words_of(f"# Two words\n\n[A link](there.md) · and\n\n{code}{table}") == 5
