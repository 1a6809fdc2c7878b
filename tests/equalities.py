"""Equalities: the same result however a model is run.

Each ``..._error`` function runs one model in two ways and returns the relative error between them.
It takes the code under test, so that the tests can plant mistakes in it.
"""

import functools
import types
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float, Int

from jllama.core import JllamaError
from jllama.core.config import LlamaConfig
from jllama.core.model import KVCache
from jllama.core.parameters import Params
from jllama.core.step import TrainState
from jllama.data.batches import text_batch
from jllama.lab.attention import attentions
from jllama.lab.checks import TOLERANCE, Check, random_params, relative_error, worst_error
from jllama.lab.conformance import Tokens, compile_implementation, implementation_of, small
from jllama.models.config import LoraConfig
from jllama.models.decode_params import DecodeParams, decode_layout
from jllama.parallel.sharding import MeshConfig, make_mesh, state_sharding
from jllama.parallel.shards import BATCH
from jllama.training.compiling import Training, compile_training
from jllama.training.config import LoopConfig, OptimizerConfig, TrainConfig

CLOSE = 1e-6
"""Relative error of float32 sums that are taken in nearly the same order."""
BFLOAT16_TOLERANCE = 3e-2
"""Relative error of logits: one rounding is off by up to 2e-3, a dozen in two blocks by 1e-2."""
SEQ = 24
LONG = 300
FAR = 100_000
CONFIG = small(
    "llama3.2-1b",
    8,
    2,
    vocab_size=96,
    embed_dim=128,
    mlp_dim=160,
    max_seq_len=512,
    tie_embeddings=False,
)
"""The model. It runs ``SEQ`` rows of ``SEQ`` tokens, or two of ``LONG``: three attention blocks."""
MESHES = {
    "data=8": MeshConfig(),
    "fsdp=8": MeshConfig(1, 8, 1),
    "data=2 fsdp=2 tensor=2": MeshConfig(2, 2, 2),
    "fsdp=2 tensor=2 sequence=2": MeshConfig(1, 2, 2, 2),
}
"""How eight devices share the work."""
Lengths = Int[np.ndarray, "rows"]
Chunks = Iterable[tuple[int, Lengths | int]]
"""The width of each chunk, and how many tokens each row is fed, if it has as many left."""


class Ways(NamedTuple):
    """The functions under test.

    Attributes:
        forward: as of ``lab.conformance.Implementation``.
        extend: likewise.
        loss: ``(config, params, tokens, mask, remat=False)`` to the mean loss in nats of all tokens
            but the first where ``mask`` holds; zero if there are none.
    """

    forward: Callable[..., Array]
    extend: Callable[..., tuple[Array, KVCache]]
    loss: Callable[..., Array]


def ways_of(model: types.ModuleType) -> Ways:
    """Return the functions of ``models.build`` or a copy of it, compiled but for the loss."""

    def loss(
        config: LlamaConfig, params: Params, tokens: Array, mask: Array, remat: bool = False
    ) -> Array:
        llama = model.build_model(config, params, remat="block" if remat else "dots")
        hidden = llama.hidden(tokens[:, :-1])
        total, count = llama.loss(hidden, tokens[:, 1:], mask)
        return total / jnp.maximum(count, 1)

    compiled = compile_implementation(implementation_of(model))
    return Ways(compiled.forward, compiled.extend, loss)


class Case(NamedTuple):
    """The code under test, a model in the training layout, and rows of tokens."""

    implementation: Any  # ``Ways``, or what has those of them that are run
    config: LlamaConfig
    params: Params
    tokens: Tokens

    @property
    def decode_params(self) -> DecodeParams:
        """The parameters in the decoding layout, which runs without a compiler too."""
        return decode_layout(jax.tree.map(jnp.asarray, self.params), self.config)

    def forward(
        self, *rows: Int[np.ndarray, "_ seq"] | None, **options: Any
    ) -> Float[np.ndarray, "rows seq vocab"]:
        """Compute the logits of one pass; arguments after the tokens are as in ``Llama.hidden``."""
        arrays = jax.tree.map(jnp.asarray, (self.tokens, *rows))  # None stays
        logits = self.implementation.forward(self.config, self.decode_params, *arrays, **options)
        return np.asarray(logits)


def equality_checks(implementation: Ways) -> list[Check]:
    """Return all checks of the group, on one small model with Llama 3.2's RoPE.

    Their tolerance is ``TOLERANCE`` where none is stated.
    """
    # A small model, and its rows of tokens.
    rng = np.random.default_rng(0)
    # With small embeddings, what attention adds counts in the logits.
    params = random_params(CONFIG, 0, embed_std=0.1)
    case = Case(implementation, CONFIG, params, rng.integers(0, CONFIG.vocab_size, (SEQ, SEQ)))
    long = case._replace(tokens=rng.integers(0, CONFIG.vocab_size, (2, LONG)))
    lengths = rng.permutation(SEQ)
    positions = np.sort(rng.integers(0, FAR, (SEQ, SEQ)))
    segments = np.sort(rng.integers(0, 4, case.tokens.shape))
    long_segments = np.sort(rng.integers(0, 4, long.tokens.shape))

    # Row n prefills n + 1 tokens; then each row decodes its other tokens one by one.
    splits = [(SEQ, np.arange(1, SEQ + 1)), *[(1, 1)] * SEQ]
    # Eight chunks of random counts, then full ones.
    chunks = {}
    for width in (1, 5, 16):
        random_chunks = [(width, counts) for counts in rng.integers(0, width + 1, (8, SEQ))]
        chunks[width] = random_chunks + [(width, width)] * SEQ

    ragged = "ragged batch against single rows"
    return [
        # Decoding with a cache, in one piece and in chunks.
        _check(
            "prefill and decode against one forward",
            f"every split of {SEQ}",
            cache_error,
            case,
            splits,
        ),
        *(
            _check(
                "chunked prefill against one forward",
                f"chunks of up to {width}",
                cache_error,
                case,
                chunks[width],
            )
            for width in chunks
        ),
        # Rows of different lengths, and packed documents.
        _check(ragged, f"{SEQ} lengths", ragged_error, case, lengths),
        _check(ragged, "other padding and mates", padding_error, case, lengths),
        _check(
            "packed documents against each alone", "up to 4 in a row", packed_error, case, segments
        ),
        # Layers, remat and dtypes.
        _check("scanned against unrolled layers", "logits", layouts_error, case, tolerance=CLOSE),
        _check("remat on against off", "loss", remat_error, case, 0, tolerance=CLOSE),
        _check("remat on against off", "gradients", remat_error, case, 1),
        _check(
            "bfloat16 against float32 weights",
            f"up to position {FAR:,}",
            bfloat16_error,
            case,
            positions,
            tolerance=BFLOAT16_TOLERANCE,
        ),
        # Each attention against reference attention.
        *(
            _check(
                "packed documents against reference attention",
                name,
                choice_error,
                long,
                long_segments,
                name,
            )
            for name in attentions()
            if name != "reference"
        ),
        # Sharding.
        *(
            _check(f"sharded against one device, {result}", column, error, case, sizes)
            for column, sizes in MESHES.items()
            for result, error in (("logits", sharded_error), ("training", sharded_training_error))
        ),
    ]


def _check(
    row: str,
    column: str,
    error: Callable[..., float],
    *arguments: Any,
    tolerance: float = TOLERANCE,
) -> Check:
    return Check("equalities", row, column, functools.partial(error, *arguments), tolerance)


def cache_error(case: Case, chunks: Chunks) -> float:
    """Compare the logits of tokens fed to a cache in chunks with those of one forward pass."""
    return worst_error(_feed(case, chunks), case.forward())


def ragged_error(case: Case, lengths: Lengths) -> float:
    """Compare rows of several lengths, prefilled together and decoded once, with each row alone."""
    together = _prompt(case, lengths)
    alone = (case._replace(tokens=row[None]).forward()[0] for row in case.tokens)
    expected = [logits[: len(row)] for logits, row in zip(alone, together, strict=True)]
    return worst_error(together, expected)


def padding_error(case: Case, lengths: Lengths) -> float:
    """Compare a ragged batch with the same rows beside other values that they must not see.

    These are the padding, the unused slots of the cache and, for the first row, other full rows.
    The logits should be exactly equal.
    """
    plain = _prompt(case, lengths)
    padded = _prompt(case, lengths, seed=1)
    other_tokens = (case.tokens + 1) % case.config.vocab_size
    other_tokens[0] = case.tokens[0]
    other_lengths = np.full_like(lengths, case.tokens.shape[1])
    other_lengths[0] = lengths[0]
    beside_others = _prompt(case._replace(tokens=other_tokens), other_lengths)[0]
    return worst_error([*padded, beside_others], [*plain, plain[0]])


def _prompt(case: Case, lengths: Lengths, seed: int = 0) -> list[Float[np.ndarray, "_ vocab"]]:
    """Prefill ``lengths[b]`` tokens of each row and decode one more; return their logits."""
    logits = _feed(case, [(case.tokens.shape[1], lengths), (1, 1)], seed)
    return [row[: length + 1] for row, length in zip(logits, lengths, strict=True)]


def _feed(case: Case, chunks: Chunks, seed: int = 0) -> Float[np.ndarray, "rows seq vocab"]:
    """Feed tokens to a cache in chunks, and return their logits; NaN for tokens that are never fed.

    Padding is random, and unused slots of the cache hold large random values. No token may see
    either.
    """
    rng = np.random.default_rng(seed)
    config = case.config
    rows, seq = case.tokens.shape
    empty = KVCache.zeros(config, rows, seq + 8)
    cache = jax.tree.map(functools.partial(_noise_like, rng), empty)
    params = case.decode_params
    num_fed = np.zeros(rows, int)
    logits = np.full((rows, seq, config.vocab_size), np.nan)
    for width, max_counts in chunks:
        counts = np.minimum(max_counts, seq - num_fed)
        if not counts.any():
            continue
        chunk = rng.integers(0, config.vocab_size, (rows, width))
        row, column = np.nonzero(np.arange(width) < counts[:, None])
        places = row, num_fed[row] + column
        chunk[row, column] = case.tokens[places]
        new, cache = case.implementation.extend(
            config, params, jnp.asarray(chunk), cache, jnp.asarray(counts)
        )
        logits[places] = np.asarray(new)[row, column]
        num_fed += counts
    return logits


def _noise_like(rng: np.random.Generator, leaf: Array) -> Array:
    """Return random values of 1e4 for keys and values; lengths stay."""
    if leaf.ndim != 4:
        return leaf
    return jnp.asarray(1e4 * rng.standard_normal(leaf.shape), leaf.dtype)


def packed_error(case: Case, segments: Tokens) -> float:
    """Compare documents that are packed in rows with each one at the start of its own row.

    A document is a run of one number in a row of ``segments``.
    """
    packed = case.forward(segments)
    errors = []
    for number in np.unique(segments):
        inside = segments == number
        at_start = np.arange(inside.shape[1]) < inside.sum(axis=1, keepdims=True)
        tokens = np.zeros_like(case.tokens)
        tokens[at_start] = case.tokens[inside]  # the zeros that follow are not seen
        alone = case._replace(tokens=tokens).forward()
        errors += [
            relative_error(packed[row][inside[row]], alone[row][at_start[row]])
            for row in range(len(tokens))
        ]
    return float(np.max(errors))


def choice_error(case: Case, segments: Tokens, attention: str) -> float:
    """Compare packed documents' logits by an attention implementation and by the reference."""
    actual = case.forward(segments, attention=attention)
    return worst_error(actual, case.forward(segments, attention="reference"))


def layouts_error(case: Case) -> float:
    """Compare the training layout, whose layers are scanned, with the unrolled decoding layout."""
    params = jax.tree.map(jnp.asarray, case.params)
    scanned = case.implementation.forward(case.config, params, jnp.asarray(case.tokens))
    return relative_error(scanned, case.forward())


def bfloat16_error(case: Case, positions: Tokens) -> float:
    """Compare weights rounded to bfloat16, and so activations in bfloat16, with float32 weights."""
    rounded = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), case.params)
    actual = case._replace(params=rounded).forward(None, positions)
    return worst_error(actual, case.forward(None, positions))


@functools.cache
def loss_and_gradients(implementation: Ways) -> Callable[..., tuple[Array, Params]]:
    """Return ``implementation.loss`` with its gradients for all parameters, compiled."""
    return jax.jit(
        jax.value_and_grad(implementation.loss, argnums=1), static_argnames=("config", "remat")
    )


def remat_error(case: Case, part: Literal[0, 1]) -> float:
    """Compare the loss (0) or the gradients (1) with and without recomputed activations."""
    compute = loss_and_gradients(case.implementation)
    mask = np.ones_like(case.tokens[:, 1:], bool)
    recomputed, stored = (
        jax.tree.leaves(compute(case.config, case.params, case.tokens, mask, remat=remat)[part])
        for remat in (True, False)
    )
    return worst_error(recomputed, stored)


def one_and_eight_devices(sizes: MeshConfig) -> tuple[Mesh, Mesh]:
    """Return a mesh of one simulated CPU device, and one of eight.

    Raises:
        JllamaError: JAX was not told to make as many devices.
    """
    devices = jax.devices("cpu")
    if len(devices) < 8:
        raise JllamaError(
            f"JAX has {len(devices)} CPU devices; sharding needs 8: set JAX_NUM_CPU_DEVICES=8"
        )
    return make_mesh(MeshConfig(1, 1, 1), devices[:1]), make_mesh(sizes, devices[:8])


def sharded_error(case: Case, sizes: MeshConfig) -> float:
    """Compare the logits that eight devices compute with those of one."""
    one, eight = (_logits_on(mesh, case) for mesh in one_and_eight_devices(sizes))
    return worst_error(eight, one)


def _logits_on(mesh: Mesh, case: Case) -> Array:
    params = jax.device_put(case.params, state_sharding(mesh, case.config, case.params))
    tokens = jax.device_put(case.tokens, NamedSharding(mesh, BATCH))
    return case.implementation.forward(case.config, params, tokens)


def sharded_training_error(case: Case, sizes: MeshConfig) -> float:
    """Compare losses and parameters of a training on eight devices with those on one."""
    runs = (train_briefly(case.config, mesh) for mesh in one_and_eight_devices(sizes))
    one, eight = ([*losses, *jax.tree.leaves(state.params)] for state, losses in runs)
    return worst_error(eight, one)


def short_training(
    config: LlamaConfig, mesh: Mesh, lora: LoraConfig | None = None, **options: Any
) -> Training:
    """Return the programs of a training of three steps.

    They are compiled without optimization, as compiling takes most of the time. AdamW's epsilon is
    large: a difference of 1e-7, from the order of sums, changes a weight by
    ``learning_rate * 1e-7 / epsilon``.
    """
    run = TrainConfig(
        config,
        optimizer=OptimizerConfig(learning_rate=3e-2, epsilon=1e-2),
        training=LoopConfig(steps=3, dtype="float32", **options),
        lora=lora or LoraConfig(),
        init_from="a base" if lora else "",
    )
    return compile_training(run, mesh, compiler_options={"xla_backend_optimization_level": 0})


@functools.cache
def train_briefly(config: LlamaConfig, mesh: Mesh) -> tuple[TrainState, list[float]]:
    """Return the state after ``short_training``, and the loss of each step in nats per token."""
    return run_three_steps(short_training(config, mesh), config)


def run_three_steps(
    training: Training, config: LlamaConfig, base: Params | None = None
) -> tuple[TrainState, list[float]]:
    """Train for three steps on random tokens; return the state and the loss of each step."""
    losses = []
    weights = [] if base is None else [jax.tree.map(jnp.asarray, base)]
    state = training.init(jax.random.key(0), *weights)
    rng = np.random.default_rng(0)
    batches = rng.integers(1, config.vocab_size, (3, 8, 17)).astype(np.int32)
    for tokens in batches:
        state, metrics = training.step(state, text_batch(tokens, bos_id=1))
        losses.append(float(metrics.loss))
    return state, losses
