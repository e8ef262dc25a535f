"""The code on the pages of the documentation and in the README runs, and prints what they show."""

import re

import pytest
import torch
from transformers import AutoModelForCausalLM

from fused_norm.model_configs import tiny_config

from ..examples.checkpoints import tokenizer_of_bytes
from .markdown_pages import ROOT, run_page

FAST = {"README.md", "docs/index.md"}
"""Pages that run in the fast tests: those for newcomers."""

PAGES = [
    pytest.param(name, marks=() if name in FAST else pytest.mark.slow)
    for name in sorted(str(path.relative_to(ROOT)) for path in [ROOT / "README.md", *ROOT.glob("docs/*.md")])
]

STAND_INS = {
    "Qwen/Qwen3-0.6B": ("qwen3", 28),
    "Qwen/Qwen3-1.7B": ("qwen3", 2),
    "google/gemma-3-1b-pt": ("gemma3_text", 2),
}
"""Models on the hub that pages name, with the family and number of layers of the tiny model that replaces each."""

ON_A_CPU = {} if torch.cuda.is_available() else {'("out", ': '("out", use_cpu=True, '}
"""What the arguments of a Trainer in bf16 need on a machine without a GPU."""


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory):
    folders = {}
    torch.manual_seed(67280421310721)  # PyTorch's own default
    for name, (family, layers) in STAND_INS.items():
        folders[name] = str(tmp_path_factory.mktemp("hub") / name.rpartition("/")[2])
        config = tiny_config(family, num_hidden_layers=layers)
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folders[name])
        tokenizer_of_bytes().save_pretrained(folders[name])
    return folders


@pytest.mark.parametrize("page", PAGES)
def test_blocks_run_and_print_what_the_page_shows(page, stand_ins, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_page(ROOT / page, tmp_path, stand_ins | ON_A_CPU)


def test_what_the_readme_links_to_is_there():
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert targets
    assert [target for target in targets if "://" not in target and not (ROOT / target).exists()] == []


PAGE = """
```python
x = 2
print(x + {number})
```

```text
5
```

<!-- not run: no -->
```python
raise SystemExit
```

<!-- not run: no -->
```console
fused-norm converge {argument} # words
```
"""


@pytest.mark.parametrize(
    ("number", "argument", "problem"),
    [("3", "qwen3", None), ("4", "qwen3", AssertionError), ("3", "--no", SystemExit)],
)
def test_a_page_that_is_wrong_fails(number, argument, problem, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(PAGE.format(number=number, argument=argument), encoding="utf-8")
    if problem is None:
        run_page(page, tmp_path, {})
        return
    with pytest.raises(problem):
        run_page(page, tmp_path, {})
