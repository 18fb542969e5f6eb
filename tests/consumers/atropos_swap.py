"""A pytest plugin for the tests of atroposlib: hermes_rl's API and packing in place of its own.

The tests start `python -m atroposlib.cli.run_api` and import functions of `atroposlib.api.utils`.
HERMES_RL names the command, PACKING the file `packing.py` (it needs nothing else).
"""

import importlib.util
import os
import subprocess
import sys
from typing import Any

import atroposlib.api.utils as utils

spec = importlib.util.spec_from_file_location("packing", os.environ["PACKING"])
assert spec is not None
assert spec.loader is not None
packing = sys.modules["packing"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(packing)


def find_groups_summing_to_target(buffer: list[Any], target_size: int) -> list[int]:
    indices: list[int] = packing.fill_group([len(group["tokens"]) for group in buffer], target_size)
    return indices


def grab(queue: list[Any], batch_size: int, env_configs: list[Any] | None = None) -> Any:
    minimums = {
        env["registered_id"]: env["min_batch_allocation"]
        for env in env_configs or ()
        if env.get("connected") and env.get("min_batch_allocation") is not None
    }
    groups = [packing.Packable(len(g["tokens"]), g.get("env_id")) for g in queue]
    indices = packing.form_batch(groups, batch_size, minimums)
    if indices is None:
        return None, queue
    return [queue[i] for i in indices], [g for i, g in enumerate(queue) if i not in set(indices)]


utils.find_groups_summing_to_target = find_groups_summing_to_target
utils.grab_exact_from_heterogeneous_queue = grab
utils.grab_batch_with_minimum_allocations = grab


class Popen(subprocess.Popen[Any]):
    """Starts the API of hermes_rl."""

    def __init__(self, args: Any, *more: Any, **named: Any) -> None:
        if "atroposlib.cli.run_api" in args:
            options = args[args.index("atroposlib.cli.run_api") + 1 :]
            args = [os.environ["HERMES_RL"], "api", "--compat", "exact", *options]
        super().__init__(args, *more, **named)


subprocess.Popen = Popen  # type: ignore[misc]
