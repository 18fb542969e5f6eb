"""An inference engine for one model: batches, exact tokens in vLLM's form, weights by file.

    python sampler.py --weights FILE

prints one JSON line, `{"base_url": ...}`, and serves until its standard input closes, which it also
does when the process that started it dies. Each answer has the version of the weights that sampled
it: new weights are loaded between two batches.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI, HTTPException
from model import Transformer, load

MOST_SEQUENCES = 64
"""In one batch."""
MOST_TOKENS = 64
"""Of an answer that names no maximum."""
NEUTRAL = {
    "top_p": (1.0,),
    "top_k": (0, -1),
    "min_p": (0.0,),
    "repetition_penalty": (1.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
}
"""Fields of a request that are only accepted where they change nothing, with those values."""


@dataclass
class Request:
    """A prompt of ids, and how to continue it."""

    prompt: list[int]
    most: int = MOST_TOKENS
    stop: frozenset[int] = frozenset()
    temperature: float = 1.0
    seed: int = 0
    top: int = 0
    """Likeliest tokens to report at each position."""


@dataclass
class Answer:
    """What was sampled."""

    version: int
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Of the distribution that was sampled from; at temperature 0, of the model's own."""
    top: list[dict[int, float]] = field(default_factory=list)


@torch.inference_mode()
def generate(model: Transformer, requests: Sequence[Request], version: int) -> list[Answer]:
    """Sample all answers in one batch. An answer depends on its own seed, not on the batch."""
    longest = max(len(request.prompt) for request in requests)
    ids = torch.tensor([[0] * (longest - len(r.prompt)) + r.prompt for r in requests])
    real = (
        torch.arange(longest) >= torch.tensor([longest - len(r.prompt) for r in requests])[:, None]
    )
    draws = [
        torch.rand(r.most, generator=torch.Generator().manual_seed(r.seed)).tolist()
        for r in requests
    ]
    heat = torch.tensor([[r.temperature or 1.0] for r in requests])
    answers, cache = [Answer(version) for _ in requests], None
    rows = list(range(len(requests)))  # unfinished requests; the others leave the batch
    for step in range(max(r.most for r in requests)):
        logits, cache = model(ids, real, cache)
        scores = (logits[:, -1] / heat).log_softmax(-1)
        sums = scores.double().exp().cumsum(-1)
        drawn = torch.tensor([[draws[row][step]] for row in rows]).double() * sums[:, -1:]
        token = torch.searchsorted(sums, drawn, right=True).clamp(max=sums.shape[1] - 1)
        greedy = torch.tensor([[requests[row].temperature == 0] for row in rows])
        token = torch.where(greedy, scores.argmax(-1, keepdim=True), token)
        picked = scores.gather(1, token)[:, 0].tolist()
        for place, row in enumerate(rows):
            answers[row].ids.append(int(token[place]))
            answers[row].logprobs.append(picked[place])
            if requests[row].top:
                best = scores[place].topk(requests[row].top)
                answers[row].top.append(
                    dict(zip(best.indices.tolist(), best.values.tolist(), strict=True))
                )
        left = [
            place
            for place, row in enumerate(rows)
            if answers[row].ids[-1] not in requests[row].stop
            and len(answers[row].ids) < requests[row].most
        ]
        if not left:
            break
        ids, heat, rows = token[left], heat[left], [rows[place] for place in left]
        real = torch.nn.functional.pad(real[left], (0, 1), value=True)
        cache = [(k[left], v[left]) for k, v in cache]
    return answers


class Engine:
    """A model; requests that wait together are sampled together."""

    def __init__(self, model: Transformer, version: int) -> None:
        self.model, self.version = model, version
        self._waiting: asyncio.Queue[tuple[Request, asyncio.Future[Answer]]] = asyncio.Queue()
        self._thread = ThreadPoolExecutor(1)
        self._sampling = asyncio.Lock()

    async def answer(self, request: Request) -> Answer:
        """Return what is sampled."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.put_nowait((request, future))
        return await future

    async def load(self, path: Path, version: int) -> None:
        """Load weights. On return, every request that is not being sampled will be by them."""
        model = await asyncio.to_thread(load, path)
        async with self._sampling:
            self.model, self.version = model, version

    async def run(self) -> None:
        """Sample one batch after the other, until cancelled."""
        while True:
            batch = [await self._waiting.get()]
            await asyncio.sleep(0.002)
            while not self._waiting.empty() and len(batch) < MOST_SEQUENCES:
                batch.append(self._waiting.get_nowait())
            requests = [request for request, _ in batch]
            async with self._sampling:
                args = (generate, self.model, requests, self.version)
                answers = await asyncio.get_running_loop().run_in_executor(self._thread, *args)
            for (_, future), answer in zip(batch, answers, strict=True):
                if not future.done():  # the client may have gone
                    future.set_result(answer)


def read_request(form: dict[str, Any], vocabulary: int) -> Request:
    """Read a body in vLLM's form. Raises: HTTPException for what this engine does not do."""
    for name, values in NEUTRAL.items():
        if form.get(name) is not None and form[name] not in values:
            raise HTTPException(400, f"{name}={form[name]}: this engine samples without it")
    prompt = form.get("prompt")
    known = isinstance(prompt, list) and all(token in range(vocabulary) for token in prompt)
    if not known or not prompt:
        raise HTTPException(400, f"prompt must be a list of ids below {vocabulary}")
    temperature, seed = form.get("temperature"), form.get("seed")
    return Request(
        prompt=prompt,
        most=form.get("max_tokens") or MOST_TOKENS,
        stop=frozenset(form.get("stop_token_ids") or ()),
        temperature=1.0 if temperature is None else float(temperature),
        seed=(int.from_bytes(os.urandom(7)) if seed is None else seed) % 2**63,
        top=int(form.get("logprobs") or 0),
    )


def write_answer(form: dict[str, Any], request: Request, answer: Answer) -> dict[str, Any]:
    """Return the body of vLLM's answer."""
    ended = answer.ids[-1] in request.stop
    return {
        "id": form.get("request_id"),
        "model": form.get("model"),
        "policy_version": str(answer.version),
        "choices": [
            {
                "index": 0,
                "text": "",
                "finish_reason": "stop" if ended else "length",
                "token_ids": answer.ids,
                "prompt_token_ids": request.prompt,
                "logprobs": {
                    "tokens": [f"token_id:{token}" for token in answer.ids],
                    "token_logprobs": answer.logprobs,
                    "top_logprobs": [
                        {f"token_id:{t}": p for t, p in top.items()} for top in answer.top
                    ],
                },
            }
        ],
        "usage": {
            "prompt_tokens": len(request.prompt),
            "completion_tokens": len(answer.ids),
            "total_tokens": len(request.prompt) + len(answer.ids),
        },
    }


def make_app(engine: Engine, log: Path | None) -> FastAPI:
    """Return the engine's routes; `log` gets a line with the ids of each answer."""
    app = FastAPI()

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": "policy", "object": "model"}]}

    @app.post("/v1/completions")
    async def completions(form: dict[str, Any]) -> dict[str, Any]:
        request = read_request(form, engine.model.shape.vocabulary)
        answer = await engine.answer(request)
        if log is not None:
            entry = {"request_id": form.get("request_id"), "prompt": request.prompt}
            with log.open("a", encoding="utf-8") as file:
                file.write(json.dumps({**entry, **asdict(answer)}) + "\n")
        return write_answer(form, request, answer)

    @app.post("/weights")
    async def weights(form: dict[str, Any]) -> None:
        await engine.load(Path(form["path"]), int(form["version"]))

    return app


async def serve(weights: Path, version: int, log: Path | None) -> None:
    """Serve on a free port until standard input closes."""
    listening = socket.create_server(("127.0.0.1", 0))
    engine = Engine(load(weights), version)
    config = uvicorn.Config(make_app(engine, log), log_level="warning")
    server = uvicorn.Server(config)

    def wait() -> None:
        sys.stdin.buffer.read()
        server.should_exit = True

    threading.Thread(target=wait, daemon=True).start()
    address = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
    print(json.dumps({"base_url": address}), flush=True)
    sampling, serving = asyncio.create_task(engine.run()), server.serve([listening])
    await asyncio.wait((sampling, asyncio.create_task(serving)), return_when="FIRST_COMPLETED")
    if sampling.done():
        sampling.result()  # raises: a batch failed
    sampling.cancel()


def main() -> None:
    """Serve until standard input closes."""
    parser = argparse.ArgumentParser(description="An inference engine for one model.")
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--version", type=int, default=0, help="of these weights")
    parser.add_argument("--log", type=Path, help="append the ids of each answer to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    asyncio.run(serve(arguments.weights, arguments.version, arguments.log))


if __name__ == "__main__":
    main()
