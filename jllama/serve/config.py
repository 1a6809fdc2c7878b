"""The server's settings. Data only, so that the command line's help does not wait for JAX."""

import dataclasses

from jllama.core import check_fields
from jllama.generation.sampling_params import SamplingParams

MAX_HEADERS = 100
"""The maximum number of headers of a request."""
MAX_HEAD_BYTES = 16 * 2**10
"""The maximum size of a request's headers together."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Sizes that are fixed when the engine starts.

    Args:
        slots: how many texts are generated at once.
        context: the maximum number of tokens of a prompt and its answer; 0 is the model's own, or
            what fits in half the memory.
        memory_gib: memory for keys and values, in GiB; 0 is what slots and context take.
        cache_tokens: how many tokens of prefixes to cache.
        queue: how many requests of one client may wait for a slot; of all clients, four times as
            many.
        prefill_budget: how many tokens of prompts to compute between two decoding steps of the
            others.
    """

    slots: int = 4
    context: int = 0
    memory_gib: float = 0.0
    cache_tokens: int = 16_384
    queue: int = 256
    prefill_budget: int = 256

    def __post_init__(self) -> None:
        check_fields(self, "", "slots prefill_budget", lambda value: value >= 1, "at least 1")
        sizes = "context memory_gib cache_tokens queue"
        check_fields(self, "", sizes, lambda value: value >= 0, "0 or more")


@dataclasses.dataclass(frozen=True, kw_only=True)
class HttpConfig:
    """Who is served, and within which limits.

    Args:
        cors: origins whose pages may use the server from a browser, such as https://example.org, or
            * for all.
        allowed_host: a name that requests may address the server by, besides localhost, 127.0.0.1
            and [::1]; if it is not set, any name, except at a loopback address (127.0.0.1, ::1).
        max_connections: how many connections may be open; another one closes the one that has been
            idle for longest.
        idle_timeout_s: close a connection that sends no complete head of a request for this long,
            or up to twice as long.
        max_body_bytes: the maximum size of a request's body.
        body_timeout_s: the maximum time for receiving a request's body.
        log_text: log prompts and answers as well.
        default: sampling settings of requests that do not set them; a seed of 0 draws one for each
            request.
        ignore_unknown: ignore fields of requests that are not served, and name them in a header of
            the answer.
    """

    cors: list[str] = dataclasses.field(default_factory=list)
    allowed_host: list[str] = dataclasses.field(default_factory=list)
    max_connections: int = 512
    idle_timeout_s: float = 10.0
    max_body_bytes: int = 4 * 2**20
    body_timeout_s: float = 30.0
    log_text: bool = False
    default: SamplingParams = dataclasses.field(default_factory=SamplingParams)
    ignore_unknown: bool = False

    def __post_init__(self) -> None:
        positive = "max_connections idle_timeout_s max_body_bytes body_timeout_s"
        check_fields(self, "", positive, lambda value: value > 0, "over 0")
