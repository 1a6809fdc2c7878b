"""What a server is set to. Data alone, so that the command line's help need not wait for JAX."""

import dataclasses

from jllama.errors import check_fields


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Sizes that are fixed when the engine starts.

    Args:
        slots: how many texts are generated at once.
        context: the most tokens of a prompt and its answer; 0 is the model's own, or what fits in half the memory.
        memory_gib: memory for keys and values; 0 is what slots and context take.
        cache_tokens: how many tokens of prefixes to keep.
        queue: how many requests may wait for a slot.
        prefill_budget: how many tokens of prompts to compute between two decoding steps of the others.
        replay: the share of answers to generate again in idle slots and compare.
    """

    slots: int = 4
    context: int = 0
    memory_gib: float = 0.0
    cache_tokens: int = 16_384
    queue: int = 256
    prefill_budget: int = 256
    replay: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self, "", "slots prefill_budget", lambda value: value >= 1, "at least 1")
        check_fields(self, "", "context memory_gib cache_tokens queue", lambda value: value >= 0, "0 or more")
        check_fields(self, "", "replay", lambda value: 0 <= value <= 1, "between 0 and 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class HttpConfig:
    """What is served to whom.

    Args:
        cors: origins whose pages may use the server from a browser, such as https://example.org, or * for all.
        max_body_bytes: a request's body may not be larger.
        body_timeout_s: and not take longer to arrive.
        log_text: log what is said, too.
    """

    cors: list[str] = dataclasses.field(default_factory=list)
    max_body_bytes: int = 4 * 2**20
    body_timeout_s: float = 30.0
    log_text: bool = False

    def __post_init__(self) -> None:
        check_fields(self, "", "max_body_bytes body_timeout_s", lambda value: value > 0, "over 0")
