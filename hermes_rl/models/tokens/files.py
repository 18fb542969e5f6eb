"""The files that make a model's tokenizer and chat template, from a folder or the hub."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from hermes_rl.errors import UserError

PATTERNS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
    "generation_config.json",
    "config.json",
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

    @property
    def special(self) -> frozenset[str]:
        """The texts of the special tokens."""
        values = (v if isinstance(v, list) else [v] for v in self.named.values())
        return frozenset(text for value in values for text in value)


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
            f"no folder {name!r}, and the hub has no tokenizer of that name: {first}"
        ) from error
    return Path(found)


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
    """Sources by name; a file of its own comes last and wins over what the configuration says."""
    for told in (config, _json(folder / "chat_template.json")):
        value = told.get("chat_template")
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


def _end_ids(folder: Path) -> frozenset[int]:
    for name in ("generation_config.json", "config.json"):
        value = _json(folder / name).get("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        found = frozenset(i for i in ids if isinstance(i, int) and not isinstance(i, bool))
        if found:
            return found
    return frozenset()
