"""docs/prompts.md lists every text that the harness can send to a model."""

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
from source_tree import ROOT


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    """The script that writes the page."""
    spec = importlib.util.spec_from_file_location("prompts_page", ROOT / "scripts/prompts_page.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_page_of_prompts_is_up_to_date(generator: ModuleType) -> None:
    page = (ROOT / "docs" / "prompts.md").read_text(encoding="utf-8")
    same = page == generator.page()
    assert same, "texts for models changed. Run: python scripts/prompts_page.py"


def test_texts_for_models_are_found_and_those_for_people_are_not(
    generator: ModuleType, tmp_path: Path
) -> None:
    source = '''
"""A module about texts."""
NOTE = "a constant that is joined to results"
def f(path, left):
    """Say something to somebody."""
    if not path:
        raise UserError("a mistake that a person reads")
    _log.warning("a line of the log, %s", path)
    assert path, "an assertion of this program"
    raise ToolError(f"no file {path!r}: {left + 1} are left")
'''
    assert list(generator.texts_in(ast.parse(source))) == [
        "a constant that is joined to results",
        "no file {path}: {left + 1} are left",
    ]


def test_no_prompt_names_a_clock_a_host_or_a_user(generator: ModuleType) -> None:
    page = generator.page()
    for name in ("time.time", "strftime", "gethostname", "getpass", "getuser", "platform."):
        assert name not in page
