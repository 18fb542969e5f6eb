"""The wire of Atropos 0.4.0 (docs/atropos.md). Its public names are in `hermes_rl.rl`."""
