"""`hermes-rl env new NAME`: a package with an environment that works at once."""

from __future__ import annotations

import keyword
import string
import sys
from importlib.machinery import PathFinder
from pathlib import Path

from hermes_rl.errors import UserError
from hermes_rl.rl.loading import known_environments

_ENVIRONMENT = '''\
"""Count words with a shell: the smallest environment that is worth changing."""

import random
from collections.abc import Iterator

from hermes_rl.rl import EnvConfig, Environment, Rollout, RolloutContext, Task, make_task

WORDS = ("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heron")


class Config(EnvConfig):
    """What `--set env.config.KEY=VALUE` may say, beside the keys of EnvConfig."""

    words: int = 40
    """Words in each text."""


class ${cls}(Environment[Config]):
    """A text file and a question; the answer goes into a file."""

    name = "${name}"
    Config = Config
    endless = True  # a run says how many tasks with --limit

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        """The same tasks for the same split and seed, always."""
        rng = random.Random(f"{split} {seed}")
        while True:
            wanted = rng.choice(WORDS)
            text = [rng.choice(WORDS) for _ in range(self.config.words)]
            yield make_task(
                f"How often is the word {wanted} in text.txt? Write the number to answer.txt.",
                files={"text.txt": " ".join(text) + "\\n"},
                oracle=f"grep -o {wanted} text.txt | wc -l >answer.txt",
                answer=text.count(wanted),
            )

    async def compute_reward(
        self, task: Task, trajectory: Rollout, ctx: RolloutContext
    ) -> float:
        """1 for the right number, 0 for anything else."""
        try:
            said = (await ctx.grading.read_file("answer.txt")).decode().strip()
        except (OSError, UnicodeDecodeError):  # no such file, or no text
            return 0.0
        return float(said == str(task.metadata["answer"]))
'''

_INIT = '''\
"""The environment ${name}."""

from .environment import ${cls}

__all__ = ["${cls}"]
'''

_MAIN = '''\
"""`python -m ${name} process ...` is `hermes-rl env process ${name} ...`."""

import sys

from hermes_rl.cli import env_main

if __name__ == "__main__":
    sys.exit(env_main(__package__))
'''

_CONFIG = """\
# hermes-rl env process ${name} --config ${name}/config.yaml --model MODEL --base-url URL
dataset:
  limit: 64         # tasks; without it they would never end
env:
  seed: 0
  config:
    group_size: 4   # rollouts of each task in `process`; `evaluate` makes one
    words: 40
agent:
  toolsets: [terminal]
  limits: {max_turns: 8}
run:
  concurrency: 32
"""

_README = """\
# ${name}

An environment for hermes_rl: how often does a word stand in a text?
Written by `hermes-rl env new`; change it.

    hermes-rl env process ${name} --model oracle --limit 8      # plays the solution: reward 1
    hermes-rl env process ${name} --model noop --limit 8        # does nothing: reward 0
    hermes-rl env evaluate ${name} --config ${name}/config.yaml --model MODEL --base-url URL
    python -m pytest ${name}                                    # pip install pytest

| file | what it holds |
|---|---|
| `environment.py` | tasks and reward |
| `config.yaml` | a run's settings |
| `test_${name}.py` | the solution gets 1, doing nothing gets 0, and the tasks are always the same |
"""

_TEST = '''\
"""What must hold of every environment; change it along with the tasks."""

from pathlib import Path

import pytest

from hermes_rl.rl.trial import first_tasks, rewards_of

HERE = Path(__file__).parent


@pytest.mark.parametrize(("model", "reward"), [("oracle", 1.0), ("noop", 0.0)])
def test_the_solution_gets_1_and_doing_nothing_0(model: str, reward: float) -> None:
    assert rewards_of(HERE, model, tasks=3) == [reward] * 3


def test_the_same_seed_gives_the_same_tasks_and_eval_has_others() -> None:
    once, again = first_tasks(HERE, 50), first_tasks(HERE, 50)
    assert once == again
    assert not set(map(str, once)) & set(map(str, first_tasks(HERE, 50, split="eval")))
'''

_FILES = {
    "__init__.py": _INIT,
    "__main__.py": _MAIN,
    "environment.py": _ENVIRONMENT,
    "config.yaml": _CONFIG,
    "README.md": _README,
    "test_{name}.py": _TEST,
}


def write_environment(name: str, folder: Path) -> Path:
    """Write the package.

    Args:
        name: of the package and of the environment.
        folder: where its folder goes.

    Returns: its folder. Raises: UserError for a name that cannot be imported, or one that is taken.
    """
    if not (name.isidentifier() and name.isascii()) or keyword.iskeyword(name):
        raise UserError(f"env new {name!r}: not a Python name. Use letters, digits and _")
    target = folder / name
    if name in known_environments() or _importable(name, target):
        raise UserError(f"env new {name}: a module of that name exists. Choose another")
    cls = "".join(word.capitalize() for word in name.split("_")) or "Env"
    words = {"name": name, "cls": cls if cls.isidentifier() else f"Env{cls}"}
    try:
        target.mkdir(parents=True)
        for file, text in _FILES.items():
            path = target / file.format(name=name)
            path.write_text(string.Template(text).substitute(words), encoding="utf-8")
    except FileExistsError:
        raise UserError(f"{target} exists already. Choose another name, or --in FOLDER") from None
    except OSError as error:
        raise UserError(f"{target}: {error.strerror}. Choose another place with --in") from None
    return target


def _importable(name: str, target: Path) -> bool:
    """Whether a module has that name already, but for what lies in `target`: it would be hidden by
    the new one, or hide it."""
    if name in sys.stdlib_module_names or name in ("hermes_rl", "batch_runner", "environments"):
        return True
    spec = PathFinder.find_spec(name)  # not what this process has loaded from elsewhere
    places = spec.submodule_search_locations or [spec.origin or ""] if spec else []
    return any(Path(place).resolve() != target.resolve() for place in places)
