"""`hermes-rl env new NAME`: write a package with an environment that works at once."""

from __future__ import annotations

import keyword
import string
import sys
from importlib.machinery import PathFinder
from pathlib import Path

from hermes_rl.errors import UserError
from hermes_rl.rl.loading import known_environments

_TEMPLATES = Path(__file__).parent / "new_environment"


def write_environment(name: str, folder: Path) -> Path:
    """Write the package from the files in `new_environment`.

    Args:
        name: of the package and of the environment.
        folder: the parent of its folder.

    Returns: its folder. Raises: UserError for a name that cannot be imported, or one that is taken.
    """
    if not (name.isidentifier() and name.isascii()) or keyword.iskeyword(name):
        raise UserError(f"env new {name!r}: not a Python name. Use letters, digits and _")
    target = folder / name
    if name in known_environments() or _importable(name, target):
        raise UserError(f"env new {name}: a module of that name exists. Choose another")
    cls = "".join(part.capitalize() for part in name.split("_")) or "Env"
    names = {"name": name, "cls": cls if cls.isidentifier() else f"Env{cls}"}
    try:
        target.mkdir(parents=True)
        for template in _TEMPLATES.glob("*.txt"):
            file = template.name.removesuffix(".txt")
            text = string.Template(template.read_text(encoding="utf-8")).substitute(names)
            path = target / (f"test_{name}.py" if file == "test.py" else file)
            path.write_text(text, encoding="utf-8")
    except FileExistsError:
        raise UserError(f"{target} exists already. Choose another name, or --in FOLDER") from None
    except OSError as error:
        raise UserError(f"{target}: {error.strerror}. Choose another place with --in") from None
    return target


def _importable(name: str, target: Path) -> bool:
    """Whether another module has that name and would be hidden by the new one, or hide it."""
    if name in sys.stdlib_module_names or name in ("hermes_rl", "batch_runner", "environments"):
        return True
    spec = PathFinder.find_spec(name)  # not what this process has loaded from elsewhere
    places = spec.submodule_search_locations or [spec.origin or ""] if spec else []
    return any(Path(place).resolve() != target.resolve() for place in places)
