"""A tokenizer read from `tokenizer.json`, which can also encode text that only looks like a token.

`encode` returns what the `tokenizers` library returns, and never adds a token (such as a second
BOS). A *mark*, one character before each character of a lookalike, says that a piece came from a
message and is text: `<|im_end|>` in a tool's output then becomes the ids of its characters.

How: a second tokenizer, built from the same file, has its added tokens under names that occur in no
text. The tokens that the template wrote are replaced by these names, the marks are removed, and
everything is encoded at once, so that each piece has the same neighbours as in the text.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from hermes_rl.errors import UserError

if TYPE_CHECKING:
    import tokenizers

_OPEN, _CLOSE = "\U000f0000", "\U000f0001"
_EXTRA = "exact tokens need tokenizers and jinja2: pip install 'hermes-rl[rl]'"


@dataclass(frozen=True)
class AddedToken:
    """A token that is matched as a whole, before the model of the tokenizer sees the text."""

    id: int
    text: str
    special: bool
    """A control token, such as `<|im_end|>`; others (`<think>` in some families) are markup."""


class Tokenizer:
    """The tokenizer of one model.

    Args:
        source: the text of `tokenizer.json`. Truncation and padding in it are left out.
        special: texts of added tokens that other files of the model call special.
        added: tokens that only other files of the model list, in the form of `added_tokens`.

    Raises:
        UserError: it is not such a file, or its added tokens do not get the ids in it.
    """

    def __init__(
        self,
        source: str | bytes,
        *,
        special: Iterable[str] = (),
        added: Iterable[Mapping[str, Any]] = (),
    ) -> None:
        raw = source.encode() if isinstance(source, str) else source
        self.sha256 = hashlib.sha256(raw).hexdigest()
        """Of the file."""
        self._spec = _spec(raw, frozenset(special), list(added))
        self._plain = _built(self._spec)
        self.added = tuple(
            AddedToken(id=form["id"], text=form["content"], special=bool(form.get("special")))
            for form in self._spec["added_tokens"]
        )
        for token in self.added:
            if self._plain.token_to_id(token.text) != token.id:
                raise UserError(
                    f"tokenizer.json: the added token {token.text!r} does not get its id {token.id}"
                    ": the file was edited, or its vocabulary belongs to another model"
                )
        self._ids = {token.text: token.id for token in self.added}
        self._texts = {token.id: token.text for token in self.added}
        self._renamed: dict[int, tokenizers.Tokenizer] = {}

    def encode(self, text: str, mark: str = "") -> list[int]:
        """Return the ids of a text; nothing is added.

        Args:
            text: rendered text. Lone surrogates, which UTF-8 cannot encode, become question marks.
            mark: the character before each character of a lookalike.
        """
        text = clean(text)
        if mark and mark in text:
            return self._encode_marked(text, mark)
        return self._plain.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, including control tokens. Incomplete characters become U+FFFD."""
        return self._plain.decode(list(ids), skip_special_tokens=False)

    def id_of(self, text: str) -> int | None:
        """Return the id of an added token."""
        return self._ids.get(text)

    def text_of(self, token_id: int) -> str | None:
        """Return the text of an added token."""
        return self._texts.get(token_id)

    def any_id_of(self, text: str) -> int | None:
        """Return the id of any token by its name in the vocabulary."""
        return self._plain.token_to_id(text)

    @property
    def size(self) -> int:
        """Number of tokens, added ones included."""
        return self._plain.get_vocab_size(with_added_tokens=True)

    def _encode_marked(self, text: str, mark: str) -> list[int]:
        salt = 0
        while _name(salt, "") in text:
            salt += 1
        pattern = lookalikes((token.text for token in self.added), after=mark)
        named = pattern.sub(lambda m: _name(salt, str(self._ids[m.group()])) + _CLOSE, text)
        encoding = self._with_names(salt).encode(named.replace(mark, ""), add_special_tokens=False)
        name = re.compile(re.escape(_name(salt, "")) + rf"(\d+){_CLOSE}")
        # A token that includes the white space next to it has it in its piece.
        found = [name.search(piece) for piece in encoding.tokens]
        return [
            int(match.group(1)) if match else token_id
            for match, token_id in zip(found, encoding.ids, strict=True)
        ]

    def _with_names(self, salt: int) -> tokenizers.Tokenizer:
        """Return the same tokenizer with its added tokens under names that occur in no text."""
        if salt not in self._renamed:
            names = {t.text: _name(salt, str(t.id)) + _CLOSE for t in self.added}
            spec = {
                **self._spec,
                "added_tokens": [
                    {**form, "content": names[form["content"]]}
                    for form in self._spec["added_tokens"]
                ],
                "model": _renamed_model(self._spec["model"], names),
                "post_processor": None,
            }
            self._renamed = {salt: _built(spec)}
        return self._renamed[salt]


def clean(text: str) -> str:
    """Replace lone surrogates, which no tokenizer accepts, by question marks."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace").decode()
    return text


def lookalikes(texts: Iterable[str], *, after: str = "") -> re.Pattern[str]:
    """Return a pattern for the leftmost, then longest of these texts, unless `after` precedes
    it."""
    longest_first = sorted({text for text in texts if text}, key=lambda text: (-len(text), text))
    choices = "|".join(re.escape(text) for text in longest_first) or r"(?!)"
    guard = f"(?<!{re.escape(after)})" if after else ""
    return re.compile(f"{guard}(?:{choices})")


def _name(salt: int, token: str) -> str:
    return f"{_OPEN}{salt}.{token}"


def _spec(raw: bytes, special: frozenset[str], added: list[Mapping[str, Any]]) -> dict[str, Any]:
    try:
        spec = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UserError(f"tokenizer.json is not valid JSON: {error}") from None
    if not isinstance(spec, dict) or not isinstance(spec.get("model"), dict):
        raise UserError("tokenizer.json has no 'model': use the format of the tokenizers library")
    known = list(spec.get("added_tokens") or [])
    have = {form["content"] for form in known}
    known += [dict(form) for form in added if form["content"] not in have]
    tokens = [
        {**form, "special": form.get("special") or form["content"] in special}
        for form in sorted(known, key=lambda form: form["id"])
    ]
    return {**spec, "added_tokens": tokens, "truncation": None, "padding": None}


def _renamed_model(model: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return the model of a tokenizer that never produces an added token from text.

    Some models have added tokens in their vocabulary, where a Unigram model finds them in text, and
    a BPE model if merges produce them.
    """
    out = dict(model)
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        out["vocab"] = {names.get(text, text): number for text, number in vocabulary.items()}
    elif isinstance(vocabulary, list):
        out["vocab"] = [[names.get(text, text), score] for text, score in vocabulary]
    if isinstance(model.get("merges"), list):
        out["merges"] = [merge for merge in model["merges"] if not _makes(merge, names)]
    if model.get("unk_token") in names:
        out["unk_token"] = names[model["unk_token"]]
    return out


def _makes(merge: Any, names: Mapping[str, str]) -> bool:
    """Return whether a merge produces one of these texts, or continues it."""
    first, second = merge.split(" ", 1) if isinstance(merge, str) else merge
    return first + second in names or first in names or second in names


def _built(spec: Mapping[str, Any]) -> tokenizers.Tokenizer:
    try:
        from tokenizers import Tokenizer as Built
    except ImportError:
        raise UserError(_EXTRA) from None
    try:
        return Built.from_str(msgspec.json.encode(spec).decode())
    except Exception as error:  # the library raises bare Exception for every bad file
        raise UserError(f"tokenizer.json: {error}") from None
