"""Run what the README shows first, as the installed package has it, with a tiny model in place of one from the hub."""

import contextlib
import io
import re
import tempfile
from importlib.metadata import metadata

from fused_norm.model_configs import FAMILIES, build

BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
NAME = re.compile(r'(?<=from_pretrained\()"[^"]+"')

readme = metadata("fused-norm").get_payload()
code, replaced = NAME.subn('"tiny"', BLOCK.search(readme)[1])
assert replaced == 1, f"it loads one model:\n{code}"
with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), io.StringIO() as printed:
    build("qwen3", seed=0).save_pretrained("tiny")
    with contextlib.redirect_stdout(printed):
        exec(code)
    found = printed.getvalue()
print(code, found, sep="\n")
for kind, count in FAMILIES["qwen3"].sites().items():
    assert f"{count} {kind}" in found or not count, f"{count} {kind} are missing"
