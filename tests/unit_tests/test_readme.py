"""What the README shows is so: its examples work, its files exist, its flags are keys, its picture is the code's."""

import re
from pathlib import Path

import numpy as np

from examples.a_packer import ByTokens
from tests.unit_tests.test_layers import FLOORS
from tests.unit_tests.test_packing import make_planner
from torchtitan_wlb.config_manager import SECTIONS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_links_lead_to_files():
    for page in ("README.md", "assets/results/README.md", "scripts/studies/README.md"):
        for link in re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text()):
            if not link.startswith("http"):
                assert (ROOT / page).parent.joinpath(link).exists(), f"{page}: {link}"
    for script in re.findall(r"scripts/[\w/]+\.\w+", README):
        assert (ROOT / script).exists(), script


def test_keys_exist():
    for section, key in re.findall(r"(?:--|`)(\w+)\.(\w+)\b", README):
        if section in SECTIONS and key not in ("json", "jsonl", "toml"):  # files
            assert key in SECTIONS[section].model_fields, f"{section}.{key}"


def test_the_picture_of_the_folders_is_the_order_of_imports():
    block = README.split("(a test holds this picture):")[1].split("```")[1]
    assert [line.split()[0] for line in block.splitlines() if line] == [
        name for floor in FLOORS for name in floor if (ROOT / "torchtitan_wlb" / name).is_dir()
    ]


def python(containing: str) -> str:
    (code,) = (c for c in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if containing in c)
    return code


def test_the_balancer_of_the_readme_balances():
    names: dict = {}
    exec(python("Balancer("), names)
    assert names["rank"] == 1 and len(names["micro_batches"]) == 16 and names["step"].waiting == 0
    step = [next(names["steps"]) for _ in range(3)][-1]
    assert len(step.ranks) == 1 and len(step.ranks[0]) == 8


def test_the_packer_of_the_examples_packs():
    assert "examples/a_packer.py" in README
    lengths = np.minimum(np.random.default_rng(0).lognormal(3, 1, 500), 100).astype(int) + 1
    planner = make_planner(lengths, epochs=1, seq_len_multiple=1)
    planner.packer = ByTokens(4, 150)
    plans = list(planner)
    trained = np.concatenate([p.spans for p in plans])
    assert sorted(trained[:, 0].tolist()) == list(range(500)) and len(planner.packer.waiting()) == 0
    tokens = np.array([[sum(s[:, 2] - s[:, 1]) for s in map(p.micro_batch, range(4))] for p in plans[:-3]])
    assert tokens.max() <= 150 and (tokens.max(1) - tokens.min(1)).mean() < 15
