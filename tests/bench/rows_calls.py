"""CPU of a model call, by dialect and transport."""

from __future__ import annotations

import json

import meter
from setting import HERE, Bench, Row


def by_wire(bench: Bench) -> Row:
    """Our transport against a bare aiohttp call; the official packages for scale."""
    conversations = max(16, bench.sizes.large // 8)
    with bench.server() as url:
        line = meter.python(HERE / "calls.py", url, str(conversations), "3")
        found: dict[str, float] = json.loads(meter.measure(line, name="calls").out)
    bare = found.pop("bare")
    own = {name: ms for name, ms in found.items() if " http" in name}
    worst = max(ms for name, ms in own.items() if "stream" not in name)
    return Row(
        "CPU per model call, client alone, worst dialect by `http`, not streamed",
        f"{worst:.2f} ms = {worst / bare:.1f} x",
        "3 x a bare aiohttp call",
        worst <= 3 * bare,
        f"bare {bare:.2f} ms",
        ("; ".join(f"{name} {ms:.2f} ms" for name, ms in found.items()),),
        {"bare": bare, **found},
    )
