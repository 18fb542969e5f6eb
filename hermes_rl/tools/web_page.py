"""The text of a web page, as a program of its own: `python -m hermes_rl.tools.web_page CHARS
[CHARSET] < PAGE` prints {title, text} as JSON.

Pages are hostile input for parsers in C: what one does to this process, it does not do to the
harness, which has keys and other conversations.
"""

from __future__ import annotations

import json
import resource
import sys

_CPU_S = 15
_MEMORY = 2 << 30


def main() -> None:
    limit, *charset = sys.argv[1:]
    for kind, bound in ((resource.RLIMIT_CPU, _CPU_S), (resource.RLIMIT_AS, _MEMORY)):
        try:
            resource.setrlimit(kind, (bound, bound))
        except (ValueError, OSError):  # not on every system
            continue
    import trafilatura

    data = sys.stdin.buffer.read()
    page = data.decode(charset[0], "replace") if charset else data
    tree = trafilatura.load_html(page)
    if tree is None:
        json.dump({"title": "", "text": ""}, sys.stdout)
        return
    title = tree.findtext(".//title") or ""
    text = trafilatura.extract(
        page, output_format="markdown", include_links=True, include_tables=True
    )
    if not text:
        text = trafilatura.html2txt(page) or ""
    fields = {"title": " ".join(title.split())[:300], "text": text[: int(limit) + 1]}
    json.dump(fields, sys.stdout)


if __name__ == "__main__":
    main()
