"""Statistics over runs."""
