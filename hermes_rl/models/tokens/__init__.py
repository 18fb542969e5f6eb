"""Exact tokens: rendering, bridging, parsing, and the graph of what a rollout sampled."""
