"""The server's metrics, in Prometheus' format."""

import time

from prometheus_client import Counter, Gauge, Histogram

from jllama.generation.requests import Row

_TIMES_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)

REQUESTS = Counter("jllama_requests", "Requests by path and status", ["path", "status"])
QUEUED = Gauge("jllama_queued_requests", "Requests that wait for a slot")
SLOTS = Gauge("jllama_slots", "Slots of the decoding program")
BUSY_SLOTS = Gauge("jllama_busy_slots", "Slots that hold a request")
PROMPT_TOKENS = Counter("jllama_prompt_tokens", "Tokens of prompts")
CACHED_TOKENS = Counter("jllama_cached_tokens", "Tokens of prompts taken from the prefix cache")
NEW_TOKENS = Counter("jllama_new_tokens", "Tokens generated")
CANCELLED = Counter("jllama_cancelled_requests", "Requests whose client left")
FIRST_TOKEN_S = Histogram(
    "jllama_time_to_first_token_seconds", "From a request's arrival", buckets=_TIMES_S
)
BETWEEN_TOKENS_S = Histogram(
    "jllama_time_between_tokens_seconds", "Mean of an answer", buckets=_TIMES_S
)


def count_row(row: Row) -> None:
    """Count the tokens and times of a row that leaves the engine."""
    num_tokens = len(row.tokens)
    PROMPT_TOKENS.inc(min(row.num_prefilled + 1, len(row.request.prompt.ids)))
    CACHED_TOKENS.inc(row.num_cached)
    NEW_TOKENS.inc(num_tokens)
    if num_tokens:
        FIRST_TOKEN_S.observe(row.first_token_s - row.arrival_s)
    if num_tokens > 1:
        BETWEEN_TOKENS_S.observe((time.monotonic() - row.first_token_s) / (num_tokens - 1))
