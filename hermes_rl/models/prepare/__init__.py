"""Preparation of stored messages for sending."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hermes_rl.lazy import attach

if TYPE_CHECKING:
    from hermes_rl.models.prepare.images import MOST_BYTES, MOST_SIDE, has_shrinkable_image
    from hermes_rl.models.prepare.pipeline import (
        NO_CONTENT,
        NO_IMAGE,
        NO_RESULT,
        ORPHAN,
        REPAIRS,
        PreparedMessages,
        blocks_of,
        cache_marks,
        canonical_json,
        has_text_or_calls,
        prepare,
        prepare_request,
        repaired_arguments,
        repaired_roles,
        small_images,
        without_grammar,
    )
else:
    __getattr__, __dir__ = attach(__name__)
