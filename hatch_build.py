"""What a built package says of its repository: its address, and links of the README that work outside of it.

The address is that of the repository whose GitHub workflow builds the package, so a fork's packages name the fork;
elsewhere it is ``repository`` of the hook in ``pyproject.toml``, and none as long as that names no owner.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_RELATIVE = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?!#|[a-z]+:)(?P<path>[^)\s]+)\)")


class RepositoryHook(MetadataHookInterface):
    """Fills ``urls`` and ``readme`` of the project's metadata."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add both; without the address of a repository the README stays as it is, and there are no ``urls``."""
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        named = self.config.get("repository", "OWNER")
        name = os.environ.get("GITHUB_REPOSITORY")
        address = f"{os.environ.get('GITHUB_SERVER_URL', 'https://github.com')}/{name}" if name else named
        if "OWNER" not in address:
            state = os.environ.get("GITHUB_REF_NAME", "HEAD")

            def absolute(link: re.Match[str]) -> str:
                kind = "raw" if link["image"] else "blob"
                return f"{link['image']}[{link['text']}]({address}/{kind}/{state}/{link['path']})"

            text = _RELATIVE.sub(absolute, text).replace(f"git+{named}", f"git+{address}")
            metadata["urls"] = {
                "Source": address,
                "Issues": f"{address}/issues",
                "Changelog": f"{address}/blob/{state}/CHANGELOG.md",
            }
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
