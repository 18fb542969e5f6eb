"""IFEval: does an answer follow verifiable instructions? A function of the scorer `python`.

The checkers are those of the package if-verifiable, the published ones. Source: arXiv:2311.07911.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def follows(answer: str, row: Mapping[str, Any]) -> tuple[float, str, dict[str, float]]:
    """Judge an answer.

    Args:
        row: `instructions` (names such as `punctuation:no_comma`), `kwargs` (the options of each)
            and `prompt` (text).

    Returns: 1 if the answer follows all instructions (prompt level, strict), else 0; those that it
        does not follow; and the metrics `instructions` (their number), `strict` and `loose` (how
        many it follows), and `prompt_loose` (1 if all). Loosely, an instruction also counts as
        followed when the answer follows it without its first line, its last line, both of them, or
        its asterisks.

    Raises: KeyError for an unknown instruction; LookupError without the data of nltk.
    """
    from if_verifiable.common import get_loose_transformations
    from if_verifiable.ifeval.instructions_registry import INSTRUCTION_DICT
    from langdetect import DetectorFactory

    DetectorFactory.seed = 0  # otherwise the same answer may be in another language the next time
    strict, loose = [], []
    for name, options in zip(row["instructions"], row["kwargs"], strict=True):
        checker = INSTRUCTION_DICT[name](name)
        checker.build_description(**options)
        if "prompt" in (checker.get_instruction_args() or ()):
            checker.build_description(prompt=row["prompt"])
        strict.append(_is_followed(checker, answer))
        # The answer itself is the first one.
        others = get_loose_transformations(answer)[1:]
        loose.append(strict[-1] or any(_is_followed(checker, other) for other in others))
    wrong = [name for name, right in zip(row["instructions"], strict, strict=True) if not right]
    metrics = {
        "instructions": len(strict),
        "strict": sum(strict),
        "loose": sum(loose),
        "prompt_loose": float(all(loose)),
    }
    return float(not wrong), f"not followed: {', '.join(wrong)}" if wrong else "", metrics


def _is_followed(checker: Any, answer: str) -> bool:
    try:
        return bool(answer.strip() and checker.check_following(answer))
    except Exception as error:  # a boundary: an answer that a checker fails on is not followed
        if type(error) is LookupError:  # of nltk, with a page of advice
            raise LookupError(
                "the data of nltk is missing. Run: python -m nltk.downloader punkt_tab"
            ) from None
        return False
