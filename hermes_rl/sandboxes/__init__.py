"""Where commands run. Backends are siblings; `hermes_rl.wiring` chooses one by name."""
