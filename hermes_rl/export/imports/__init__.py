"""Files of other programs, as run directories."""
