"""The only file that knows all variants by name: from a configuration to parts that work together.

A `Workshop` is what one process needs for its rollouts: a client, a limiter, a sandbox backend and
the
tools, opened once and shared by all rollouts of the process.
"""
