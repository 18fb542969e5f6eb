"""Build hook of the package: compiles the launcher of sandboxes, hermes_rl/sandboxes/zygote.c.

Without a C compiler the package is built without it, and bubblewrap starts all sandboxes.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = Path(__file__).parent / "hermes_rl" / "sandboxes" / "zygote.c"
BINARY = SOURCE.with_suffix("")
FLAGS = ("-std=gnu11", "-O2", "-Wall", "-Wextra", "-fstack-protector-strong")


def compile_zygote() -> str:
    """Compile it beside its source. Returns why that cannot be done; empty when it is done."""
    compiler = next(filter(shutil.which, (os.environ.get("CC", ""), "cc", "gcc", "clang")), None)
    if compiler is None:
        return "no C compiler"
    # Asked for at each start, so that a binary of an older source is never used.
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    half = BINARY.with_name(f".zygote-{os.getpid()}")
    command = [compiler, *FLAGS, f'-DDIGEST="{digest}"', "-o", str(half), str(SOURCE)]
    try:
        for link in (["-static"], []):  # static: it needs none of the machine's libraries
            done = subprocess.run([*command, *link], capture_output=True, text=True, check=False)
            if done.returncode == 0:
                half.chmod(0o755)
                half.rename(BINARY)
                return ""
    except OSError as error:
        return str(error)
    finally:
        half.unlink(missing_ok=True)
    return " ".join(done.stderr.split())[-300:]


class ZygoteHook(BuildHookInterface[Any]):
    """Adds the compiled launcher to wheels, which then fit one kind of machine."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before a wheel, an editable one too, is written."""
        if self.target_name != "wheel" or platform.system() != "Linux":
            return
        problem = compile_zygote()
        if problem:
            self.app.display_warning(f"{SOURCE.name} is not compiled: {problem}")
        elif version != "editable":  # which finds it beside its source
            build_data["force_include"][str(BINARY)] = f"hermes_rl/sandboxes/{BINARY.name}"
            build_data["pure_python"] = False
            machine = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["tag"] = f"py3-none-{machine}"
