"""The tokenizer and chat template that a GGUF file holds, in the form of a model's folder.

Layout (GGUF version 2 and 3): magic, version, counts, then key, type and value of each entry, all
little-endian. Only byte-level BPE is supported, with the pre-tokenizers of gguf.json.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from hermes_rl.errors import UserError
from hermes_rl.models.tokens import TokenizerFiles

_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
"""Kind of value -> its format for `struct`."""
_UINT32, _STRING, _ARRAY = 4, 8, 9
_CONTROL, _MARKUP = 3, 4
"""Types of added tokens."""
_MAX_LENGTH = 1 << 31
"""A file with a longer text or list is damaged."""

_PRE_TOKENIZERS: dict[str, list[dict[str, Any]]] = msgspec.json.decode(
    Path(__file__).with_suffix(".json").read_bytes()
)
"""`tokenizer.ggml.pre` -> how text is split before merges, in the form of tokenizer.json."""


def read_tokenizer(path: Path) -> TokenizerFiles:
    """Read the tokenizer of a GGUF file.

    Raises: UserError when it is not a GGUF file, or its kind of tokenizer is not supported.
    """
    metadata = _read_metadata(path)
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    template = metadata.get("tokenizer.chat_template")
    if kind != "gpt2" or pre not in _PRE_TOKENIZERS or not isinstance(template, str):
        raise UserError(
            f"{path.name} holds a tokenizer of kind {kind}/{pre} that is not supported. "
            "Name the model's tokenizer with endpoint.tokenizer"
        )
    texts: list[str] = metadata["tokenizer.ggml.tokens"]
    kinds: list[int] = metadata["tokenizer.ggml.token_type"]
    named = {
        f"{name}_token": texts[metadata[f"tokenizer.ggml.{name}_token_id"]]
        for name in ("bos", "eos")
        if f"tokenizer.ggml.{name}_token_id" in metadata
    }
    ends = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot"))
    return TokenizerFiles(
        tokenizer=msgspec.json.encode(_spec(texts, kinds, metadata["tokenizer.ggml.merges"], pre)),
        templates={"default": template},
        named=named,
        end_ids=frozenset(end for end in ends if isinstance(end, int)),
    )


def _read_metadata(path: Path) -> dict[str, Any]:
    """Read all metadata of a GGUF file. Raises: UserError."""
    try:
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ValueError("not a GGUF file")
            version, _, entries = struct.unpack("<IQQ", _exactly(file, 20))
            if version not in (2, 3) or entries > _MAX_LENGTH:
                raise ValueError(f"version {version}")
            return {_text(file): _value(file, *_scalars(file, _UINT32, 1)) for _ in range(entries)}
    except (ValueError, struct.error) as error:
        raise UserError(f"{path}: its metadata cannot be read ({error})") from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None


def _spec(texts: list[str], kinds: list[int], merges: list[str], pre: str) -> Mapping[str, Any]:
    """Return the contents of tokenizer.json."""
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": place, "content": text, "special": kind == _CONTROL, **plain}
            for place, (text, kind) in enumerate(zip(texts, kinds, strict=True))
            if kind in (_CONTROL, _MARKUP)
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": _PRE_TOKENIZERS[pre]},
        "post_processor": None,
        "decoder": _PRE_TOKENIZERS["gpt-2"][0],
        "model": {
            "type": "BPE",
            "vocab": {text: place for place, text in enumerate(texts)},
            "merges": merges,
            "ignore_merges": False,
        },
    }


def _value(file: BinaryIO, kind: int) -> Any:
    if kind in _SCALARS:
        return _scalars(file, kind, 1)[0]
    if kind == _STRING:
        return _text(file)
    if kind != _ARRAY:
        raise ValueError(f"a value of kind {kind}")
    inner, count = struct.unpack("<IQ", _exactly(file, 12))
    if count > _MAX_LENGTH:
        raise ValueError(f"a list of {count}")
    if inner in _SCALARS:
        return list(_scalars(file, inner, count))
    return [_value(file, inner) for _ in range(count)]


def _scalars(file: BinaryIO, kind: int, count: int) -> tuple[Any, ...]:
    form = f"<{count}{_SCALARS[kind]}"
    return struct.unpack(form, _exactly(file, struct.calcsize(form)))


def _text(file: BinaryIO) -> str:
    (length,) = struct.unpack("<Q", _exactly(file, 8))
    return _exactly(file, length).decode("utf-8", "replace")


def _exactly(file: BinaryIO, count: int) -> bytes:
    data = file.read(count) if count <= _MAX_LENGTH else b""
    if len(data) != count:
        raise ValueError("it is truncated")
    return data
