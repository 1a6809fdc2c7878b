"""OpenAI's API: answers, from the engine's events to JSON, complete or in parts as they come."""

import base64
import codecs
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jllama.core import UsageError
from jllama.generation.requests import Answer, Piece, Token
from jllama.serve.protocol import Chat, Continuation, Embedding, Job
from jllama.serve.tools import ToolParser
from jllama.system.files import Json

# OpenAI's value for a token that cannot be drawn: JSON has no infinity.
_MIN_LOG_PROB = -9999.0


class Choice:
    """One text of an answer."""

    def __init__(self, job: Job, index: int) -> None:
        self._body = job.body
        self._index = index
        self._is_chat = isinstance(job.body, Chat)
        tokenizer = job.model.text_tokenizer
        self._pieces = tokenizer.pieces
        self._names = {id: name for name, id in tokenizer.special_tokens.items()}
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0  # of the next token, in characters
        self._echoed = ""
        self._parser = None
        if isinstance(job.body, Continuation) and job.body.echo:
            prompt = job.body.prompts[index // job.body.n]
            self._echoed = prompt if isinstance(prompt, str) else tokenizer.decode(prompt)
        elif isinstance(job.body, Chat) and job.dialect:
            prompt = job.requests[index].prompt
            key = f"{job.head['system_fingerprint']} {prompt.sampling.seed} {len(prompt.ids)}"
            names = [tool["function"]["name"] for tool in job.body.tools]
            self._parser = ToolParser(job.dialect, names, key, job.body.parallel_tool_calls)

    def opening(self) -> Json:
        """Return the first part of a stream: the role, or the prompt if it is echoed."""
        if self._is_chat:
            return self._part({"delta": {"role": "assistant", "content": ""}})
        return self._part({"text": self._echoed})

    def parts(self, event: Piece | Answer) -> Iterator[Json]:
        """Yield the parts of a stream for an event; the reason of the end has its own part."""
        is_end = isinstance(event, Answer)
        pieces = self._split("" if is_end else event.text, is_end)
        log_probs = None if is_end else self._log_probs(event.tokens)
        if log_probs and not pieces:
            pieces = [""]
        for piece in pieces:
            content = {"tool_calls": [piece]} if isinstance(piece, dict) else {"content": piece}
            yield self._part({"delta": content} if self._is_chat else {"text": piece}, log_probs)
            log_probs = None
        if is_end:
            yield self._part({"delta": {}} if self._is_chat else {"text": ""}, None, event)

    def whole(self, answer: Answer) -> Json:
        """Return the complete choice."""
        if answer.pooled:
            return self._part({"embedding": answer.pooled})
        pieces = self._split(answer.completion.text, True)
        text = "".join(piece for piece in pieces if isinstance(piece, str))
        calls = [piece for piece in pieces if isinstance(piece, dict)]
        if isinstance(self._body, Continuation):
            tokens = answer.tokens
            if self._body.echo:
                # lm-eval counts on a token after the prompt, also if that is a stop.
                tokens = answer.prompt_tokens + tokens + answer.end
            return self._part({"text": self._echoed + text}, self._log_probs(tokens), answer)
        message: Json = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message["content"] = text or None
            message["tool_calls"] = [
                {key: value for key, value in call.items() if key != "index"} for call in calls
            ]
        return self._part({"message": message}, self._log_probs(answer.tokens), answer)

    def _part(self, content: Json, log_probs: Any = None, answer: Answer | None = None) -> Json:
        """Return a choice with this content; ``answer`` if it is the last part."""
        reason = None
        if answer:
            is_stop = answer.completion.finish_reason.startswith("stop")
            reason = "stop" if is_stop else "length"
            if self._parser and self._parser.calls:
                reason = "tool_calls"
        return {"index": self._index, **content, "logprobs": log_probs, "finish_reason": reason}

    def _split(self, text: str, is_end: bool) -> Sequence[str | Json]:
        """Return the next text and calls of tools."""
        if self._parser:
            return self._parser.push(text, is_end)
        return [text] if text else []

    def _log_probs(self, tokens: Sequence[Token]) -> Json | None:
        """Return log-probabilities in the form of chats or completions; None if not requested."""
        if not tokens or self._body.logprobs is None or self._body.logprobs is False:
            return None
        items = [self._token(token.id, token.log_prob) for token in tokens]
        tops = [[self._token(*likely) for likely in token.top] for token in tokens]
        if self._is_chat:
            pairs = zip(items, tops, strict=True)
            content = [item | {"top_logprobs": top} for item, top in pairs]
            return {"content": content, "refusal": None}
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            piece = self._pieces[token.id]
            self._offset += len(self._decoder.decode(piece))
            # A special token is no text of an answer, but a prompt may spell it out.
            name = self._names.get(token.id, "")
            if not piece and self._echoed.startswith(name, self._offset):
                self._offset += len(name)
        top_log_probs = [
            {likely["token"]: likely["logprob"] for likely in [*top, item]} if top else None
            for item, top in zip(items, tops, strict=True)
        ]
        return {
            "tokens": [item["token"] for item in items],
            "token_logprobs": [item["logprob"] for item in items],
            "top_logprobs": top_log_probs,
            "text_offset": offsets,
        }

    def _token(self, id: int, log_prob: float | None) -> Json:
        text = self._pieces[id] or self._names.get(id, "").encode()
        try:
            name = text.decode()
        except UnicodeDecodeError:
            # A part of a character, written as OpenAI does, so that each part has its own name.
            name = "bytes:" + "".join(f"\\x{byte:02x}" for byte in text)
        finite = None if log_prob is None else max(log_prob, _MIN_LOG_PROB)
        return {"token": name, "logprob": finite, "bytes": [*text]}


def embeddings(body: Embedding, answer: Json) -> Json:
    """Convert the answer to a ``Pooled`` body to embeddings: float32 vectors of length 1."""
    vectors = np.array([choice["embedding"] for choice in answer["choices"]])
    size = vectors.shape[1]
    if body.dimensions not in (None, size):
        raise UsageError(
            f"dimensions is {body.dimensions}; the model's embeddings have {size}: leave it out"
        )
    vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype("<f4")
    encoded = vectors.tolist()
    if body.encoding_format == "base64":
        encoded = [base64.b64encode(vector.tobytes()).decode() for vector in vectors]
    data = [
        {"object": "embedding", "index": index, "embedding": vector}
        for index, vector in enumerate(encoded)
    ]
    return {"object": "list", "data": data, "model": answer["model"], "usage": answer["usage"]}


def stream_event(content: Json) -> str:
    """Return an unnamed server-sent event."""
    return f"data: {json.dumps(content, ensure_ascii=False, separators=(',', ':'))}\n\n"


def totals(job: Job, answers: Mapping[int, Answer]) -> Json:
    """Return an answer's token counts, each prompt counted once, and its receipt if requested.

    A receipt contains what ``jllama verify replay`` needs to generate and compare the answer.

    Args:
        job: the request.
        answers: the texts that are complete, by index.
    """
    body = job.body
    prompt = sum(len(request.prompt.ids) for request in job.requests[:: body.n])
    new = sum(answer.completion.new_tokens for answer in answers.values())
    cached = sum(answer.cached_tokens for index, answer in answers.items() if index % body.n == 0)
    counts = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
    result: Json = {"usage": counts | {"prompt_tokens_details": {"cached_tokens": cached}}}
    if body.receipt:
        names = body.model_fields_set - {"stream", "stream_options"} | {"seed"}
        request = {name: getattr(body, name) for name in sorted(names)}
        completions = [answers[index].completion for index in sorted(answers)]
        result["receipt"] = {
            "path": "/v1/chat/completions" if isinstance(body, Chat) else "/v1/completions",
            "request": request | {"model": job.head["model"]},
            "system_fingerprint": job.head["system_fingerprint"],
            "ids": [completion.ids for completion in completions],
            "log_probs": [completion.log_probs for completion in completions],
        }
    return result
