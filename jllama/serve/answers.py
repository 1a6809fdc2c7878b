"""OpenAI's protocol: answers, from what the engine gives to JSON, whole or in parts as they come."""

import base64
import codecs
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jllama.errors import UsageError
from jllama.files import Json
from jllama.generation.requests import Answer, Piece, Token
from jllama.serve.protocol import Chat, Continuation, Embedding, Job
from jllama.serve.tools import ToolParser

_LEAST = -9999.0  # what OpenAI's API says of a token that cannot be drawn: JSON has no infinity


class Choice:
    """One text of an answer."""

    def __init__(self, job: Job, index: int) -> None:
        self._body, self._index, prompt = job.body, index, job.requests[index].prompt
        tokenizer, self._parser = job.model.text_tokenizer, None
        self._pieces, self._names = (
            tokenizer.pieces,
            {id: name for name, id in tokenizer.special_tokens.items()},
        )
        self._decoder, self._offset, self._echoed = (
            codecs.getincrementaldecoder("utf-8")("replace"),
            0,
            "",
        )
        if isinstance(job.body, Continuation) and job.body.echo:
            given = job.body.prompts[index // job.body.n]
            self._echoed = given if isinstance(given, str) else tokenizer.decode(given)
        elif isinstance(job.body, Chat) and job.dialect:
            key = f"{job.head['system_fingerprint']} {prompt.sampling.seed} {len(prompt.ids)}"
            names = [tool["function"]["name"] for tool in job.body.tools]
            self._parser = ToolParser(job.dialect, names, key, job.body.parallel_tool_calls)

    def opening(self) -> Json:
        """What a stream begins with: the role, or the prompt if it is echoed."""
        is_chat = isinstance(self._body, Chat)
        return self._part(
            {"delta": {"role": "assistant", "content": ""}} if is_chat else {"text": self._echoed}
        )

    def parts(self, event: Piece | Answer) -> Iterator[Json]:
        """What a stream says of an event; the reason of the end in a part of its own."""
        text, tokens = (event.text, event.tokens) if isinstance(event, Piece) else ("", ())
        log_probs, is_chat = self._log_probs(tokens), isinstance(self._body, Chat)
        for found in self._certain(text, isinstance(event, Answer)) or ([""] if log_probs else []):
            delta = {"content": found} if isinstance(found, str) else {"tool_calls": [found]}
            yield self._part({"delta": delta} if is_chat else {"text": found}, log_probs)
            log_probs = None
        if isinstance(event, Answer):
            yield self._part({"delta": {}} if is_chat else {"text": ""}, None, self._reason(event))

    def whole(self, answer: Answer) -> Json:
        """All of it."""
        if answer.pooled:
            return self._part({"embedding": answer.pooled})
        found = self._certain(answer.completion.text, True)
        text = "".join(each for each in found if isinstance(each, str))
        if isinstance(self._body, Continuation):
            log_probs = self._log_probs(
                [*(answer.prompt_tokens if self._body.echo else ()), *answer.tokens]
            )
            return self._part({"text": self._echoed + text}, log_probs, self._reason(answer))
        calls = [
            {key: call[key] for key in call if key != "index"}
            for call in found
            if isinstance(call, dict)
        ]
        message: Json = {
            "role": "assistant",
            "content": text or (None if calls else ""),
            "refusal": None,
        }
        message |= {"tool_calls": calls} if calls else {}
        return self._part(
            {"message": message}, self._log_probs(answer.tokens), self._reason(answer)
        )

    def _part(self, content: Json, log_probs: Any = None, reason: str | None = None) -> Json:
        return {"index": self._index, **content, "logprobs": log_probs, "finish_reason": reason}

    def _certain(self, text: str, is_end: bool) -> Sequence[str | Json]:
        return self._parser.push(text, is_end) if self._parser else [text] if text else []

    def _reason(self, answer: Answer) -> str:
        if self._parser and self._parser.calls:
            return "tool_calls"
        return "stop" if answer.completion.finish_reason.startswith("stop") else "length"

    def _log_probs(self, tokens: Sequence[Token]) -> Json | None:
        """Log-probabilities of tokens, as chats or as completions have them, if they are asked for."""
        if not tokens or self._body.logprobs is None or self._body.logprobs is False:
            return None
        shown = [self._token(token.id, token.log_prob) for token in tokens]
        tops = [[self._token(*each) for each in token.top] for token in tokens]
        if isinstance(self._body, Chat):
            both = zip(shown, tops, strict=True)
            return {
                "content": [each | {"top_logprobs": top} for each, top in both],
                "refusal": None,
            }
        names, rows = ("tokens", "token_logprobs", "top_logprobs", "text_offset"), []
        for token, each, top in zip(tokens, shown, tops, strict=True):
            best = {one["token"]: one["logprob"] for one in [*top, each]} if top else None
            rows.append((each["token"], each["logprob"], best, self._offset))
            self._offset += len(self._decoder.decode(self._pieces[token.id]))
        return {
            name: [*column] for name, column in zip(names, zip(*rows, strict=True), strict=True)
        }

    def _token(self, id: int, log_prob: float | None) -> Json:
        text = self._pieces[id] or self._names.get(id, "").encode()
        try:
            name = text.decode()
        except (
            UnicodeDecodeError
        ):  # a part of a character; as OpenAI writes it, so that each part has its own name
            name = "bytes:" + "".join(f"\\x{byte:02x}" for byte in text)
        finite = None if log_prob is None else max(log_prob, _LEAST)
        return {"token": name, "logprob": finite, "bytes": [*text]}


def embeddings(body: Embedding, answer: Json) -> Json:
    """What a body asks for of the answer to its ``Pooled``: each as float32, of length 1."""
    vectors = np.array([choice["embedding"] for choice in answer["choices"]])
    size = vectors.shape[1]
    if body.dimensions not in (None, size):
        raise UsageError(
            f"dimensions is {body.dimensions}; the model's embeddings have {size}: leave it out"
        )
    vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype("<f4")
    shown = vectors.tolist()
    if body.encoding_format == "base64":
        shown = [base64.b64encode(vector.tobytes()).decode() for vector in vectors]
    data = [
        {"object": "embedding", "index": index, "embedding": each}
        for index, each in enumerate(shown)
    ]
    return {"object": "list", "data": data, "model": answer["model"], "usage": answer["usage"]}


def stream_event(content: Json) -> str:
    """An event of a stream, without a name."""
    return f"data: {json.dumps(content, ensure_ascii=False, separators=(',', ':'))}\n\n"


def totals(job: Job, answers: Mapping[int, Answer]) -> Json:
    """The counts of an answer's tokens, each prompt's once, and what it takes to make it again if that is asked for.

    ``answers`` are those of the texts that are there, by index.
    """
    prompt = sum(len(request.prompt.ids) for request in job.requests[:: job.body.n])
    new = sum(answer.completion.new_tokens for answer in answers.values())
    cached = sum(
        answer.cached_tokens for index, answer in answers.items() if index % job.body.n == 0
    )
    counts = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
    found: Json = {"usage": counts | {"prompt_tokens_details": {"cached_tokens": cached}}}
    if job.body.receipt:
        names = job.body.model_fields_set - {"stream", "stream_options"} | {"seed"}
        completions = [answers[index].completion for index in sorted(answers)]
        found["receipt"] = {
            "path": "/v1/chat/completions" if isinstance(job.body, Chat) else "/v1/completions",
            "request": {name: getattr(job.body, name) for name in sorted(names)}
            | {"model": job.head["model"]},
            "system_fingerprint": job.head["system_fingerprint"],
            "ids": [completion.ids for completion in completions],
            "log_probs": [completion.log_probs for completion in completions],
        }
    return found
