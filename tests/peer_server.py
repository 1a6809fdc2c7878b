"""A server with OpenAI's API over transformers, with one mistake planted; and servers that fail."""

import contextlib
import dataclasses
import http.server
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers

from jllama.templates.messages import TEMPLATES, message_ids
from jllama.tokenizers.base import BytesTokenizer

TOKENIZER = BytesTokenizer()
NAMES = [f"token_id:{id}" for id in range(1000)]  # as vLLM names tokens, if asked to


@dataclasses.dataclass
class Program:
    """A model and what surrounds it."""

    model: Any
    template: str = TEMPLATES["llama2"]
    window: int | None = None
    ahead: int = 0
    num_bos: int = 1
    decoded_shift: int = 0
    context: int = 1 << 20
    max_top: int = 5
    refuses: tuple[str, ...] = ()  # fields of requests

    def log_probs(self, ids: list[int], num_prompt: int) -> torch.Tensor:
        positions = torch.arange(len(ids))
        visible = positions[:, None] + self.ahead >= positions[None]
        if self.window:
            visible &= positions[:, None] - positions[None] < self.window
        mask = torch.where(visible, 0.0, float("-inf"))[None, None]
        positions[num_prompt:] += self.decoded_shift
        with torch.no_grad():
            logits = self.model(
                torch.tensor([ids]), attention_mask=mask, position_ids=positions[None]
            ).logits[0]
        return torch.log_softmax(logits.double(), -1)

    def complete(self, ids: list[int], body: dict[str, Any]) -> tuple[list[int], torch.Tensor]:
        """The ids with new ones, and the log-probabilities of all."""
        ids = ids[-self.context :]
        num_prompt = len(ids)
        found = self.log_probs(ids, num_prompt)
        for _ in range(body["max_tokens"]):
            ids = [*ids, int(found[-1].argmax())]
            found = torch.cat([found, self.log_probs(ids, num_prompt)[-1:]])
        return ids, found

    def entries(self, ids: list[int], log_probs: torch.Tensor, first: int) -> list[dict[str, Any]]:
        found = []
        for place in range(first, len(ids)):
            row = log_probs[place - 1]
            tops = row.topk(self.max_top).indices.tolist() if place else []
            found.append(
                {
                    "token": NAMES[ids[place]],
                    "logprob": float(row[ids[place]]) if place else None,
                    "top_logprobs": [
                        {"token": NAMES[id], "logprob": float(row[id])} for id in tops
                    ],
                }
            )
        return found

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        """The answer to a request; None refuses it."""
        if any(name in body for name in self.refuses):
            return None
        if path == "/v1/chat/completions":
            ids = message_ids(TOKENIZER, self.template, body["messages"], True)
            whole, log_probs = self.complete(ids, body)
            content = self.entries(whole, log_probs, len(ids))
            message = {"role": "assistant", "content": TOKENIZER.decode(whole[len(ids) :])}
            return {"choices": [{"message": message, "logprobs": {"content": content}}]}
        if path != "/v1/completions" or "prompt_logprobs" in body:
            return None
        ids = body["prompt"]
        if isinstance(ids, str):
            ids = [TOKENIZER.bos_id] * self.num_bos + TOKENIZER.encode(ids)
        whole, log_probs = self.complete(ids, body)
        num_prompt = len(whole) - body["max_tokens"]
        choice: dict[str, Any] = {"text": TOKENIZER.decode(whole[num_prompt:])}
        if "logprobs" in body:
            first = 0 if body.get("echo") else num_prompt
            entries = self.entries(whole, log_probs, first)
            choice["logprobs"] = {
                "tokens": [one["token"] for one in entries],
                "token_logprobs": [one["logprob"] for one in entries],
                "top_logprobs": [
                    {top["token"]: top["logprob"] for top in one["top_logprobs"]} for one in entries
                ],
            }
        return {"choices": [choice]}


Answer = Callable[[str, dict[str, Any]], dict[str, Any] | None]


@contextlib.contextmanager
def serving(answer: Answer) -> Iterator[str]:
    """Serve what a function answers; yield the address."""
    lock = threading.Lock()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(200, {"data": [{"id": "tested"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                found = answer(self.path, body)
            if found is None:
                self._send(400, {"error": "not served here"})
            elif body.get("stream"):
                self._send(200, found, "data: {}\n\ndata: [DONE]\n\n")
            else:
                self._send(200, found)

        def _send(self, status: int, content: Any, form: str = "{}") -> None:
            text = form.replace("{}", json.dumps(content)).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def open_model(folder: Path, **changes: Any) -> Any:
    """The checkpoint in transformers, with other values in its configuration."""
    config = transformers.AutoConfig.from_pretrained(folder)
    for name, value in changes.items():
        setattr(config, name, value)
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=torch.float32, attn_implementation="eager"
    )


def change_weights(model: Any, ending: str, change: Callable[[torch.Tensor], Any]) -> Any:
    """The model with other weights, where names end so."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(ending):
                weight.copy_(torch.as_tensor(change(weight)))
    return model


def interleave(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Rows as in Meta's files."""
    heads = weight.reshape(-1, 2, head_dim // 2, weight.shape[1])
    return heads.transpose(1, 2).reshape(weight.shape)


def quantize(weight: torch.Tensor) -> np.ndarray:
    kind = gguf.GGMLQuantizationType.Q8_0
    return gguf.dequantize(gguf.quantize(weight.numpy().copy(), kind), kind)


def rope_parameters(model_folder: Path, **changes: Any) -> dict[str, Any]:
    config = transformers.AutoConfig.from_pretrained(model_folder)
    return {**config.rope_parameters, **changes}


def late(path: str, body: dict[str, Any]) -> None:
    time.sleep(2)
