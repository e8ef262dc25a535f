"""Tables in Markdown, and their places in pages: between ``<!-- MARK -->`` and ``<!-- end of MARK -->``."""

from __future__ import annotations

import re
from collections.abc import Sequence


def in_markdown(rows: Sequence[Sequence[str]], rule: str = "---:") -> str:
    """Rows of cells, the first being the header, as a table; ``rule`` says how columns but the first are aligned."""
    header, *lines = rows
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, ["---", *[rule] * (len(header) - 1)], *lines))


def page_with(page: str, mark: str, table: str) -> str:
    """The text of a page with a table between its two marks, of which the first may say more after a colon.

    Raises:
        ValueError: it has no such marks.
    """
    marks = rf"(<!-- {re.escape(mark)}(?::[^>]*)? -->).*?(<!-- end of {re.escape(mark)} -->)"
    page, count = re.subn(marks, lambda match: f"{match[1]}\n\n{table}\n\n{match[2]}", page, flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"the page has {count} places for {mark}, between <!-- {mark} --> and <!-- end of {mark} -->")
    return page
