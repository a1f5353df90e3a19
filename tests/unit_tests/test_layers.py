"""The house: every import points down its floors, no circle, files that fit on a few screens."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
# From the ground up; a module imports from its own floor's package or from floors below it.
FLOORS = [
    ["errors", "logger", "parent", "config_types", "torch_private"],
    ["folders"],
    ["config", "loss"],
    ["cost"],
    ["packing"],
    ["models"],
    ["context_parallel"],
    ["data"],
    ["profiling", "generation"],
    ["parallelisms"],
    ["optimizer", "run_state", "layout_packing"],
    ["checkpoint", "evaluation"],
    ["initial_weights", "metrics", "config_manager", "config_checks"],
]
WITHOUT_TORCH = ["errors", "logger", "config_types", "config", "config_manager", "cost", "packing"]
PLANS_WITHOUT_TORCH = ["shard_plan", "hybrid", "selection", "traffic"]


def modules() -> dict[str, tuple[Path, set[str]]]:
    """{module inside the package: (file, modules it imports, those of the package without its name)}."""
    found = {}
    for path in sorted((ROOT / "torchtitan_wlb").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT / "torchtitan_wlb").with_suffix("").parts).removesuffix(".__init__")
        if name == "__init__" or not path.read_text():
            continue
        imported = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                imported.add(node.module.removeprefix("torchtitan_wlb."))
            elif isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
        found[name] = path, imported
    return found


def floor(module: str) -> int:
    return next(i for i, floor in enumerate(FLOORS) if module.split(".")[0] in floor)


def test_every_module_has_a_floor_and_imports_point_down():
    found = modules()
    wrong = [
        f"{name} imports {other}"
        for name, (_, imported) in found.items()
        for other in imported & found.keys()
        if floor(other) > floor(name) or (floor(other) == floor(name) and other.split(".")[0] != name.split(".")[0])
    ]
    # The four at the top and those at the bottom stand side by side.
    assert not [w for w in wrong if "config_checks imports" not in w], wrong


def test_no_module_imports_itself_over_others():
    found = {name: imported for name, (_, imported) in modules().items()}
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> None:
        assert name not in path, " -> ".join([*path, name])
        if name not in done:
            for other in found[name] & found.keys():
                visit(other, [*path, name])
            done.add(name)

    for name in found:
        visit(name, [])


def test_planning_does_not_need_torch():
    found = modules()
    for name, (_, imported) in found.items():
        package, _, last = name.partition(".")
        if package in WITHOUT_TORCH or (package == "context_parallel" and last in PLANS_WITHOUT_TORCH):
            used = {m.split(".")[0] for m in imported}
            assert not used & {"torch", "torchdata"}, name
            below = [m for m in imported & found.keys() if m.split(".")[0] not in (*WITHOUT_TORCH, "context_parallel")]
            assert not below, (name, below)


def test_files_are_short_and_the_private_names_of_torch_are_in_one_of_them():
    for name, (path, imported) in modules().items():
        assert len(path.read_text().splitlines()) <= 350, name
        if name != "torch_private":
            private = [m for m in imported if m.startswith("torch.") and any(p.startswith("_") for p in m.split("."))]
            assert not private, (name, private)
    assert len((ROOT / "train.py").read_text().splitlines()) <= 420
