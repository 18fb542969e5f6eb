"""hermes_rl: from a prompt dataset and a model endpoint to training-ready agent trajectories."""

__version__ = "0.1.0"
