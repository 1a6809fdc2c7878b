"""``jllama replay``."""

import dataclasses
import http.client
import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from jllama.commands.cli import parse
from jllama.errors import JllamaError
from jllama.files import fault_of, read_json_object


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """Have a server make an answer again, and compare: fingerprint, tokens and log-probabilities, bit for bit.

    Examples:
        answer.json --url http://127.0.0.1:8000

    Args:
        answer: a file with an answer, as the server gave it to a request with "receipt": true.
        url: where the server is.
        api_key: the key that the server wants, if any.
    """

    answer: str
    url: str = "http://127.0.0.1:8000"
    api_key: str = ""


def main(argv: list[str], prog: str) -> int:
    """Ask again, compare, and say what differs."""
    options = parse(ReplayOptions, argv, prog, ("answer",))
    before = _receipt(read_json_object(Path(options.answer)), options.answer)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {options.api_key}"}
    with fault_of(
        f"{options.url} gave no answer", OSError, ValueError, TypeError, http.client.HTTPException
    ):
        address, body = (
            f"{options.url.rstrip('/')}{before['path']}",
            json.dumps(before["request"]).encode(),
        )
        try:
            with urllib.request.urlopen(urllib.request.Request(address, body, headers)) as reply:
                answer = json.load(reply)
        except urllib.error.HTTPError as error:
            raise ValueError(
                f"status {error.code}, {error.read(1000).decode(errors='replace')}"
            ) from error
    after = _receipt(answer, options.url)
    if differs := [
        name for name in ("system_fingerprint", "ids", "log_probs") if before[name] != after[name]
    ]:
        raise JllamaError(f"the answer came out otherwise: {' and '.join(differs)} differ")
    print(f"the same answer, bit for bit, of {after['system_fingerprint']}")
    return 0


def _receipt(answer: dict[str, Any], source: str) -> dict[str, Any]:
    found = answer.get("receipt")
    if (
        not isinstance(found, dict)
        or {"path", "request", "system_fingerprint", "ids", "log_probs"} - found.keys()
    ):
        raise JllamaError(f'{source} holds no receipt: ask with "receipt": true')
    return found
