"""Show that a policy learns from `rollouts()` on this CPU: three seeds, each with its control.

    make prove [PROVE_ARGS='--seeds 1 2 3 --out runs/prove']

The control's advantages are permuted within each group; all else is the same. Writes `curves.json`
and `curves.png`, and exits with 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from dataclasses import asdict
from pathlib import Path

import torch
from model import save
from train import Curve, train
from warm_start import demonstrate, imitate, train_tokenizer

LEAST_RISE, MOST_RISE_OF_CONTROL = 0.3, 0.05
DEMONSTRATIONS = 2000


def rise(curve: Curve) -> float:
    """Return by how much the held-out reward rose."""
    return curve.rewards[-1] - curve.rewards[0]


def plot(curves: list[Curve], path: Path) -> None:
    """Draw the held-out reward over the steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for curve in curves:
        style = {"color": "0.6", "linestyle": "--"} if curve.control else {"linestyle": "-"}
        label = f"seed {curve.seed}, advantages permuted" if curve.control else f"seed {curve.seed}"
        axes.plot(curve.steps, curve.rewards, marker="o", markersize=3, label=label, **style)
    axes.set(xlabel="GRPO step (128 rollouts each)", ylabel="held-out reward", ylim=(0, 1))
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> int:
    """Run all; return the exit code."""
    parser = argparse.ArgumentParser(description="Train a small policy with rollouts() on a CPU.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--out", type=Path, default=Path("runs/prove"))
    arguments = parser.parse_args()
    out: Path = arguments.out / time.strftime("%Y%m%d-%H%M%S")
    out.mkdir(parents=True)
    torch.set_num_threads(1)  # the other core is the sampler's
    started = time.monotonic()
    tokenizer = train_tokenizer(out / "tokenizer")
    rows = asyncio.run(demonstrate(out / "demonstrations", tokenizer, DEMONSTRATIONS))
    print(f"{len(rows)} demonstrations by an oracle, {time.monotonic() - started:.0f} s")
    curves: list[Curve] = []
    for seed in arguments.seeds:
        started = time.monotonic()
        save(imitate(rows, tokenizer, seed), out / f"warm-{seed}.pt")
        spent = time.monotonic() - started
        first = None
        for name in (f"seed {seed}", f"seed {seed}, control"):
            print(f"{name}: warm start {spent:.0f} s", flush=True)
            folder = out / name.replace(" ", "-").replace(",", "")
            made = train(folder, tokenizer, out / f"warm-{seed}.pt", seed, first)
            curves.append(asyncio.run(made))
            first = curves[-1]
            first.seconds += spent
            print(f"  rise {rise(curves[-1]):+.3f} in {curves[-1].seconds:.0f} s")
            text = json.dumps([asdict(curve) for curve in curves], indent=1)
            (out / "curves.json").write_text(text, encoding="utf-8")
    plot(curves, out / "curves.png")
    learned = all(rise(curve) >= LEAST_RISE for curve in curves if not curve.control)
    flat = all(rise(curve) < MOST_RISE_OF_CONTROL for curve in curves if curve.control)
    print(f"{out}: learned: {learned}; controls stay: {flat}")
    return 0 if learned and flat else 1


if __name__ == "__main__":
    raise SystemExit(main())
