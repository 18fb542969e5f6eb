"""Type checkers of users read our annotations."""

from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_each_import_root_says_that_it_is_typed() -> None:
    roots = [ROOT / "hermes_rl", ROOT / "batch_runner"]
    roots += [init.parent for init in (ROOT / "environments").glob("*/__init__.py")]
    assert [root.name for root in roots if not (root / "py.typed").is_file()] == []
