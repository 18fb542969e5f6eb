"""Secrets of this process are replaced in every form, and ordinary text is left as it is."""

import base64
import json
from collections.abc import Callable
from urllib.parse import quote

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hermes_rl.leaks import find_leaks
from hermes_rl.text import KnownSecrets

KEY = 'sk-live/7Qx+f2"9%c\\mZ1-d4'
MARK = "[secret KEY]"

letters = st.characters(min_codepoint=33, max_codepoint=0x2FF, exclude_categories=["Cs"])
values = st.text(letters, min_size=10, max_size=60).filter(lambda v: bool(known(v).find(_utf8(v))))
texts = st.text(max_size=40)
FORMS: dict[str, Callable[[str], str]] = {
    "raw": str,
    "base64": lambda v: base64.b64encode(v.encode()).decode(),
    "base64 at offset 1": lambda v: base64.b64encode(b"x" + v.encode() + b"y").decode(),
    "base64 at offset 2": lambda v: base64.b64encode(b"xy" + v.encode() + b"z").decode(),
    "urlsafe base64": lambda v: base64.urlsafe_b64encode(v.encode()).decode(),
    "wrapped base64": lambda v: base64.encodebytes(v.encode() * 3).decode(),
    "percent-encoded": lambda v: quote(v, safe=""),
    "percent-encoded throughout": lambda v: "".join(f"%{b:02x}" for b in v.encode()),
    "hexadecimal": lambda v: v.encode().hex(),
    "hexadecimal in pairs": lambda v: v.encode().hex(" ").upper(),
    "JSON": json.dumps,
    "JSON in JSON": lambda v: json.dumps(json.dumps({"output": v}, ensure_ascii=False)),
    "one character a line": "\n".join,
    "lines in JSON": lambda v: json.dumps({"output": f"{v[:5]}\n{v[5:]}"}),
    "quoted parts": lambda v: f"'{v[:4]}' \"{v[4:]}\"",
}


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def known(*values: str) -> KnownSecrets:
    secrets = KnownSecrets()
    for value in values:
        secrets.learn("KEY", value)
    return secrets


@pytest.mark.parametrize("form", FORMS)
@given(value=values, before=texts, after=texts)
@example(value=KEY, before="Key: ", after=" end")
def test_no_encoding_of_a_secret_is_left(form: str, value: str, before: str, after: str) -> None:
    secrets = known(value)
    coded = FORMS[form](value)
    shown = secrets.scrub(before + coded + after)
    assert MARK in shown
    assert secrets.find(_utf8(shown)) == []
    if not MARK.startswith(value[:1]) and coded not in before + MARK + after:
        assert coded not in shown


@given(text=st.text(max_size=400))
def test_ordinary_text_is_unchanged(text: str) -> None:
    assert known(KEY).scrub(text) is text


@given(parts=st.lists(texts, max_size=5), cut=st.integers(1, len(KEY) - 1))
def test_adjacent_texts_of_a_message_are_searched_together(parts: list[str], cut: int) -> None:
    split = [*parts, KEY[:cut], KEY[cut:], *parts]
    record = {"role": "user", "content": [{"type": "text", "text": t} for t in split], "n": [1, 2]}
    secrets = known(KEY)
    shown = secrets.scrub_record(record)
    content = [part["text"] for part in shown["content"]]  # type: ignore[index]
    assert secrets.find(_utf8("".join(content))) == []
    assert len(content) == len(split)
    assert shown["n"] == [1, 2]


@given(value=st.dictionaries(texts, st.lists(texts | st.integers(), max_size=3), max_size=4))
def test_a_record_without_secrets_is_the_same_object(value: dict[str, object]) -> None:
    assert known(KEY).scrub_record(value) is value


@pytest.mark.parametrize(
    "record",
    [
        [1, KEY],
        (None, 0.5, {"a": KEY}),
        {"type": KEY},
        {"type": {"description": KEY}},
        {"properties": {"type": [KEY]}},
    ],
)
def test_no_field_of_a_record_keeps_a_secret(record: object) -> None:
    assert KEY not in str(known(KEY).scrub_record(record))
    assert MARK in str(known(KEY).scrub_record(record))


def test_a_secret_in_another_case_is_found_and_a_common_name_is_not() -> None:
    assert "9xwb4y" not in known("nvapi-Zq8tRk2vLm9xWb4y").scrub(
        "http://nvapi-zq8trk2vlm9xwb4y.org/"
    )
    assert known("MyProject").scrub("myproject and MYPROJECT") == "myproject and MYPROJECT"


@pytest.mark.parametrize("before", ["\\", "C:\\", "\\\\", '{"a": "\\\\'])
def test_a_backslash_before_a_secret_is_not_taken_for_a_line_break(before: str) -> None:
    key = "nvapi-Zq8tRk2vLm9xWb4y"
    assert key not in known(key).scrub(f"{before}{key}")
    assert key not in known(key).scrub(f"{before}n{key}\\n")


@given(value=values, text=texts)
def test_json_stays_json(value: str, text: str) -> None:
    document = json.dumps({"a": f"{text}{value}{text}", "b": [text, value[:3], value[3:]]})
    msgspec.json.decode(known(value).scrub(document))


@pytest.mark.parametrize(
    ("name", "value", "counts"),
    [
        ("OPENAI_API_KEY", "sk-abc123def456", True),
        ("DB_PASSWORD", "hunter2hunter2", True),
        ("MY_PROXY_TOKEN", "http://me:s3cr3t-pass@host:1", True),
        ("AWS_SECRET_ACCESS_KEY", "/JalrXUtnFEMI7K7MDENGbPxRfiCYEXAMPLEKEY", True),
        ("TOKENIZERS_PARALLELISM", "Fa1se-enough", False),
        ("SSH_KEY", "/home/someone/.ssh/id_rsa", False),
        ("MAX_TOKEN", "100000000", False),
        ("TOKEN_FILE", "token.json", False),
        ("API_KEY", "true", False),
        ("API_KEY", "disabled", False),
        ("HOME", "sk-abc123def456", False),
    ],
)
def test_secret_variables_are_recognized_by_name_and_value(
    name: str, value: str, counts: bool
) -> None:
    secrets = KnownSecrets()
    secrets.learn_environment({name: value})
    assert bool(secrets.find(value.encode())) == counts


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("key sk-proj-" + "aB3_" * 10, "OpenAI or Anthropic key"),
        (json.dumps("a\nsk-ant-api03-" + "aB3-" * 10), "OpenAI or Anthropic key"),
        ("sk-" + "0a1b2c3d" * 4, "OpenAI or Anthropic key"),
        ("ghp_" + "aB3d" * 9, "GitHub token"),
        ("github_pat_" + "11AB_cd3" * 8, "GitHub fine-grained token"),
        ("AKIA" + "ABCD1234" * 2, "AWS access key"),
        ("AIza" + "aB3-d" * 7, "Google API key"),
        ("xoxb-" + "123456789012-" * 2 + "aBcD", "Slack token"),
        ("hf_" + "aBcDeFgHiJ" * 3 + "kLmN", "Hugging Face token"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIEowIBAAKCAQEAabcd", "private key"),
        (f"eyJ{'hbGciOiJI' * 2}.eyJ{'zdWIiOiIx' * 2}.{'SflKxwRJ' * 3}", "JSON Web Token"),
        ("postgres://me:Tr0ub4dor@db.local/x", "password in a URL"),
    ],
)
def test_provider_key_formats_are_found_and_not_shown(text: str, kind: str) -> None:
    [leak] = find_leaks(text)
    assert leak.kind == kind
    assert len(leak.sample) < 25


@pytest.mark.parametrize(
    "text",
    [
        "sk-estimator-doc-link-toggleable-content-x",
        "task-0123456789abcdef0123456789abcdef01234567",
        "the prefix hf_ and ghp_ and sk-... of keys",
        "-----BEGIN PRIVATE KEY-----' in text",
        "http://user:password@host/ and http://u:$PASS@host and scp://a@b:c",
        "https://host:8080/path@version and a://b.c:80/@x",
    ],
)
def test_similar_text_is_not_found(text: str) -> None:
    assert find_leaks(text) == []


@pytest.mark.parametrize("repeated", ["eyJ", "-eyJ", "xoxb-", "AKIA", ".eyJaaaaaaaaaa", "sk-ant-"])
def test_long_texts_are_searched_quickly(repeated: str) -> None:
    """Time that grows with the square of the length would be hours."""
    assert len(find_leaks(repeated * 1_000_000)) <= 1
