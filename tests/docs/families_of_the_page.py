"""A pytest plugin that adds the families that docs/extending.md defines to the table."""

import gc

from fused_norm.model_configs import FAMILIES
from fused_norm.model_configs.families import Family

from .markdown_pages import ROOT, blocks_of

written = {}
for block in blocks_of((ROOT / "docs" / "extending.md").read_text(encoding="utf-8")):
    if " = Family(" in block.text:
        exec(block.text, written)
(table,) = gc.get_referents(FAMILIES)  # the mapping below the read-only view
table |= {family.model_type: family for family in written.values() if isinstance(family, Family)}
