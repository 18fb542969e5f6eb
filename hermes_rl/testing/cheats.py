"""Agent programs that try for a reward without doing the task: every verifier must give them 0.

Each is a bash script that is run in place of a task's oracle, and knows the harness. cheats.toml
holds them and says how they are written.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

_EACH_PROGRAM = r"""
find "$W" -path '*/.git' -prune -o -type f -size -64k -print 2>/dev/null |
while IFS= read -r f; do
  chmod u+w "$f" 2>/dev/null
  IFS= read -r first <"$f" 2>/dev/null || first=
  case "$f:$first" in
@CASES@  esac
done
"""

_DATA = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def _script(cheat: dict[str, str]) -> str:
    script = cheat.get("script") or _EACH_PROGRAM.replace("@CASES@", cheat["each_program"])
    programs = re.sub(r"@(\w+)@", lambda name: shlex.quote(_DATA["program"][name[1]]), script)
    return f'W="${{WORKSPACE:-$PWD}}"\n{programs}true'


CHEATS: dict[str, str] = {name: _script(cheat) for name, cheat in _DATA["cheat"].items()}
"""Name -> script."""

BUNDLES: dict[str, tuple[str, ...]] = {}
"""Cheats that can be tried in one rollout, as none undoes another; each is in one bundle."""
for _name, _cheat in _DATA["cheat"].items():
    BUNDLES[_cheat["bundle"]] = (*BUNDLES.get(_cheat["bundle"], ()), _name)


def bundle(name: str) -> str:
    """The script of a bundle: its cheats one after another, in a shell of their own each."""
    return "\n".join(f"(\n{CHEATS[cheat]}\n)" for cheat in BUNDLES[name])


def traced(name: str) -> str:
    """The script of a cheat; then it prints `left by NAME` if it found something to work on."""
    trace = _DATA["cheat"][name]["trace"]
    after = f'if {{ {trace}; }}; then echo "left by {name}"; fi'
    return f"_was=$PATH\n{CHEATS[name]}\nPATH=$_was\n{after}\n"
