"""Prompt caching from the configuration to the row: asked for unless it is turned off."""

import pytest

from .conftest import script

TASK = {"prompt": script({"run": "true"}, {"run": "true"}, "Done.")}


@pytest.mark.parametrize(("fields", "reads"), [({}, True), ({"prompt_cache": "1h"}, True),
                                              ({"prompt_cache": "off"}, False)])  # fmt: skip
async def test_markers_are_sent_where_a_provider_wants_them(stage, fields, reads):
    endpoint = {"api_mode": "anthropic_messages", **fields}
    opened = await stage(backend="none", endpoint=endpoint)
    trajectory = await opened.attempt(TASK)
    assert len(trajectory.calls) == 3
    read = [call.cache_read_tokens or 0 for call in trajectory.calls]
    assert read[0] == 0
    assert (read[1] > 0, read[2] > read[1]) == (reads, reads)
    assert bool(trajectory.usage.cache_write_tokens) == reads
