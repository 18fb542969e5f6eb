"""A renderer by a model's name: the hub is asked for the small files, never for weights."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from render_kit import printed

from hermes_rl.messages import UserMessage
from hermes_rl.testing import tiny_renderer, write_tiny_tokenizer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def hub(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """A hub with one model, owner/model; yields its address and the requested files."""
    request: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(body=True)

        def do_HEAD(self) -> None:
            self.answer(body=False)

        def answer(self, *, body: bool) -> None:
            path = self.path.partition("?")[0]
            name = path.rpartition("/")[2]
            names = sorted(file.name for file in folder.iterdir())
            if path.startswith("/api/models/owner/model/tree/"):
                sizes = {name: (folder / name).stat().st_size for name in names}
                rows = [
                    {"type": "file", "path": name, "size": size, "oid": "0" * 40}
                    for name, size in sizes.items()
                ]
                content = json.dumps(rows).encode()
            elif path.startswith("/api/models/owner/model"):
                reported = {"id": "owner/model", "modelId": "owner/model", "sha": COMMIT}
                files = [{"rfilename": name} for name in names]
                content = json.dumps({**reported, "siblings": files}).encode()
            elif path.startswith("/owner/model/resolve/") and name in names:
                content = (folder / name).read_bytes()
                request.append(name)
            else:
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Content-Type", "application/json")
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", f'"{sha1(content, usedforsecurity=False).hexdigest()}"')
            self.end_headers()
            if body:
                self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", request
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_hub_model_is_read_without_weights(tmp_path: Path) -> None:
    folder = write_tiny_tokenizer(tmp_path / "model", "qwen3")
    (folder / "model.safetensors").write_bytes(b"weights")
    code = (
        "from hermes_rl.models.tokens import load_renderer\n"
        "from hermes_rl.messages import UserMessage\n"
        "print(load_renderer('owner/model').render([UserMessage(content='hi')]))"
    )
    with hub(folder) as (address, request):
        offered = printed(
            code,
            HF_ENDPOINT=address,
            HF_HOME=str(tmp_path / "home"),
            HF_HUB_DISABLE_XET="1",
            NO_PROXY="127.0.0.1",
        )
    assert json.loads(offered) == tiny_renderer("qwen3").render([UserMessage(content="hi")])
    assert set(request) == {"tokenizer.json", "tokenizer_config.json"}
