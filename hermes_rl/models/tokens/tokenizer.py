"""A model's files, and its tokenizer, which can also encode text that only looks like a token.

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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from hermes_rl.errors import UserError

if TYPE_CHECKING:
    import tokenizers

_OPEN, _CLOSE = "\U000f0000", "\U000f0001"
EXTRA = "exact tokens need tokenizers and jinja2: pip install 'hermes-rl[rl]'"


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
        rows: number of ids of the model, which may have more than its tokenizer; 0 if unknown.

    Raises:
        UserError: it is not such a file, or its added tokens do not get the ids in it.
    """

    def __init__(
        self,
        source: str | bytes,
        *,
        special: Iterable[str] = (),
        added: Iterable[Mapping[str, Any]] = (),
        rows: int = 0,
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
        self.rows = max(rows, self.size)
        """Number of ids of the model, as far as its files tell."""

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

    def find_unknown_id(self, ids: Sequence[int]) -> int | None:
        """Return the first id that neither the model nor its tokenizer has."""
        if not ids or max(ids) < self.rows:
            return None
        return next((i for i in ids if i >= self.rows and self._plain.id_to_token(i) is None), None)

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
        raise UserError(EXTRA) from None
    try:
        return Built.from_str(msgspec.json.encode(spec).decode())
    except Exception as error:  # the library raises bare Exception for every bad file
        raise UserError(f"tokenizer.json: {error}") from None


# The files of a model

PATTERNS = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.json", "chat_template.jinja", "additional_chat_templates/*.jinja"),
    *("generation_config.json", "config.json"),
)
"""The files that are fetched from the hub; never weights."""


@dataclass(frozen=True)
class TokenizerFiles:
    """The contents of a model's tokenizer files."""

    tokenizer: bytes
    """The text of tokenizer.json."""
    templates: Mapping[str, str] = field(default_factory=dict)
    """Sources by name."""
    named: Mapping[str, Any] = field(default_factory=dict)
    """`bos_token` and the like, as templates read them: texts, and lists of texts."""
    added: tuple[Mapping[str, Any], ...] = ()
    """Added tokens that tokenizer_config.json or added_tokens.json list."""
    end_ids: frozenset[int] = frozenset()
    """Of generation_config.json and config.json."""
    rows: int = 0
    """`vocab_size` of config.json; 0 without one."""

    @property
    def special(self) -> frozenset[str]:
        """The texts of the special tokens."""
        values = (v if isinstance(v, list) else [v] for v in self.named.values())
        return frozenset(text for value in values for text in value)

    def build(self) -> Tokenizer:
        """Return the tokenizer. Raises: UserError."""
        return Tokenizer(self.tokenizer, special=self.special, added=self.added, rows=self.rows)


def folder_of(path_or_name: str | Path, revision: str | None = None) -> Path:
    """Return the folder itself, or a folder with the files of a model from the hub.

    Raises: UserError when there is neither, or the hub is unreachable.
    """
    path = Path(path_or_name).expanduser()
    if path.is_dir():
        return path
    if path.name == "tokenizer.json" and path.is_file():
        return path.parent
    name = str(path_or_name)
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise UserError(f"no tokenizer at {name}: give a folder with tokenizer.json")
    return _fetched(name, revision)


def _fetched(name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    try:
        found = snapshot_download(name, revision=revision, allow_patterns=list(PATTERNS))
    except Exception as error:  # the hub's client raises its own, its transport's and the system's
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"no folder {name!r}, and the hub gives no tokenizer of that name: {first}"
        ) from error
    return Path(found)


def load_tokenizer(path_or_name: str | Path) -> Tokenizer:
    """Return the tokenizer of a model.

    Args:
        path_or_name: a folder with tokenizer.json, or a model's name on the hub.

    Raises: UserError when files are missing or unreadable.
    """
    return read_folder(folder_of(path_or_name)).build()


def read_folder(folder: Path) -> TokenizerFiles:
    """Read all files of a folder.

    Raises: UserError when tokenizer.json is missing or a file is not valid JSON.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise UserError(
            f"{folder} has no tokenizer.json: save the tokenizer as a fast one (transformers does)"
        )
    config = _json(folder / "tokenizer_config.json")
    named = {**_named(config), **_named(_json(folder / "special_tokens_map.json"))}
    return TokenizerFiles(
        tokenizer=path.read_bytes(),
        templates=dict(_templates(folder, config)),
        named=named,
        added=tuple(_added(config, _json(folder / "added_tokens.json"))),
        end_ids=_end_ids(folder),
        rows=_rows(_json(folder / "config.json")),
    )


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = msgspec.json.decode(path.read_bytes())
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} is not a JSON object")
    return value


def _named(form: Mapping[str, Any]) -> dict[str, Any]:
    """Return the special tokens that a file names, each as its text."""
    out: dict[str, Any] = {}
    for key, value in form.items():
        if key.endswith("_token") and (text := _text(value)) is not None:
            out[key] = text
        elif key == "additional_special_tokens" and isinstance(value, list):
            out[key] = [text for item in value if (text := _text(item)) is not None]
    return out


def _text(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _templates(folder: Path, config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Sources by name; a separate file comes last and overrides the configuration."""
    for form in (config, _json(folder / "chat_template.json")):
        value = form.get("chat_template")
        if isinstance(value, str):
            yield "default", value
        for item in value if isinstance(value, list) else ():
            if isinstance(item, dict) and {"name", "template"} <= item.keys():
                yield str(item["name"]), str(item["template"])
    alone = folder / "chat_template.jinja"
    if alone.is_file():
        yield "default", alone.read_text(encoding="utf-8")
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        yield path.stem, path.read_text(encoding="utf-8")


def _added(config: Mapping[str, Any], by_text: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    decoder = config.get("added_tokens_decoder")
    for key, form in decoder.items() if isinstance(decoder, dict) else ():
        if isinstance(form, dict) and str(key).isdigit() and isinstance(form.get("content"), str):
            kept = {name: bool(form.get(name)) for name in (*plain, "special")}
            yield {**kept, "content": form["content"], "id": int(key)}
    for text, token_id in by_text.items():
        if isinstance(token_id, int):
            yield {**plain, "content": text, "id": token_id, "special": False}


def _rows(config: Mapping[str, Any]) -> int:
    """Return the number of ids of a model; models of several media have a part for text."""
    part = config.get("text_config")
    forms = (config, part if isinstance(part, dict) else {})
    return max((n for form in forms if type(n := form.get("vocab_size")) is int), default=0)


def _end_ids(folder: Path) -> frozenset[int]:
    for name in ("generation_config.json", "config.json"):
        value = _json(folder / name).get("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        found = frozenset(i for i in ids if isinstance(i, int) and not isinstance(i, bool))
        if found:
            return found
    return frozenset()
