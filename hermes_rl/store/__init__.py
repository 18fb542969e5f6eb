"""The run directory: schema, journal, commit, recovery, reader."""
