"""What must come out the same however it is run: checks of jllama against itself, and of attention against the oracle.

The functions take the code under test, so that deliberate mistakes can be planted, and return a relative error.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Bool, Float, Int

from jllama import functional as F
from jllama import oracle
from jllama.config import LlamaConfig
from jllama.data.batches import text_batch
from jllama.decode_params import decode_layout
from jllama.errors import JllamaError
from jllama.model import KVCache
from jllama.parameters import Params
from jllama.sharding import BATCH, MeshConfig, make_mesh, state_sharding
from jllama.training.config import LoopConfig, OptimizerConfig, TrainConfig
from jllama.training.step import Training, TrainState, compile_training
from jllama.verify.checks import TOLERANCE, Check, random_params, relative_error, worst_error
from jllama.verify.conformance import Implementation, Tokens, small

CLOSE = 1e-6  # relative error of float32 sums that are taken in nearly the same order
BFLOAT16_TOLERANCE = (
    3e-2  # of logits: a rounding is off by up to 2e-3, the dozen of two blocks by about 1e-2
)
DTYPES = ((jnp.float32, "", TOLERANCE), (jnp.bfloat16, " in bfloat16", 1e-2))
"""The dtypes that attention is checked in, what they add to its name, and the largest error of right code."""
SEQ, LONG, FAR = 24, 300, 100_000
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
"""The model that the command runs, on ``SEQ`` rows of ``SEQ`` tokens or two of ``LONG``, three blocks of attention."""
MESHES = {
    "data=8": MeshConfig(),
    "fsdp=8": MeshConfig(1, 8, 1),
    "data=2 fsdp=2 tensor=2": MeshConfig(2, 2, 2),
    "fsdp=2 tensor=2 sequence=2": MeshConfig(1, 2, 2, 2),
}  # how eight devices share the work
HEADS, HEAD_DIM, KV_HEADS = 8, 64, (8, 2, 1)  # multi-head, grouped-query and multi-query attention

Attention = Callable[[Array, Array, Array, F.Mask], Array]
"""``(query, key, value, mask) -> mixed``, shaped as in ``functional.attention``."""
Dense = Bool[np.ndarray, "rows seq kv_seq"]
Lengths = Int[np.ndarray, "rows"]
Chunks = Iterable[tuple[int, Lengths | int]]
"""The width of each chunk of tokens, and how many of them are fed to each row, if that many are left."""


class Case(NamedTuple):
    """What is run in several ways: the code under test, a model in the training layout, and rows of tokens."""

    implementation: Implementation
    config: LlamaConfig
    params: Params
    tokens: Tokens

    def forward(
        self, *where: Int[np.ndarray, "_ seq"] | None, **options: Any
    ) -> Float[np.ndarray, "rows seq vocab"]:
        """Logits of one pass in the decoding layout, which runs without a compiler too; arguments as in ``hidden``."""
        arrays = (None if array is None else jnp.asarray(array) for array in (self.tokens, *where))
        return np.asarray(
            self.implementation.forward(self.config, self.decode_params, *arrays, **options)
        )

    decode_params = property(
        lambda self: decode_layout(jax.tree.map(jnp.asarray, self.params), self.config)
    )


def equality_checks(implementation: Implementation) -> list[Check]:
    """The whole group, on one small model with Llama 3.2's RoPE."""
    rng = np.random.default_rng(0)
    params = random_params(
        CONFIG, 0, embed_std=0.1
    )  # small, so that what attention adds counts in the logits
    case = Case(implementation, CONFIG, params, rng.integers(0, CONFIG.vocab_size, (SEQ, SEQ)))
    long = case._replace(tokens=rng.integers(0, CONFIG.vocab_size, (2, LONG)))
    lengths, positions = rng.permutation(SEQ), np.sort(rng.integers(0, FAR, (SEQ, SEQ)))
    segments, long_segments = (
        np.sort(rng.integers(0, 4, one.tokens.shape)) for one in (case, long)
    )
    splits = [(SEQ, np.arange(1, SEQ + 1)), *[(1, 1)] * SEQ]
    chunks = {
        n: [*((n, most) for most in rng.integers(0, n + 1, (8, SEQ))), *[(n, n)] * SEQ]
        for n in (1, 5, 16)
    }
    ragged, packed, remat = (
        "ragged batch against single rows",
        "packed documents against ",
        "remat on against off",
    )
    chunked, bfloat16 = "chunked prefill against one forward", "bfloat16 against float32 weights"
    rows: list[tuple] = [
        (
            "prefill and decode against one forward",
            f"every split of {SEQ}",
            TOLERANCE,
            cache_error,
            case,
            splits,
        ),
        *(
            (chunked, f"chunks of up to {n}", TOLERANCE, cache_error, case, fed)
            for n, fed in chunks.items()
        ),
        (ragged, f"{SEQ} lengths", TOLERANCE, ragged_error, case, lengths),
        (ragged, "other padding and mates", TOLERANCE, padding_error, case, lengths),
        (packed + "each alone", "up to 4 in a row", TOLERANCE, packed_error, case, segments),
        ("scanned against unrolled layers", "logits", CLOSE, layouts_error, case),
        (remat, "loss", CLOSE, remat_error, case, 0),
        (remat, "gradients", TOLERANCE, remat_error, case, 1),
        (bfloat16, f"up to position {FAR:,}", BFLOAT16_TOLERANCE, bfloat16_error, case, positions),
        *(
            (
                packed + "reference attention",
                name,
                TOLERANCE,
                choice_error,
                long,
                long_segments,
                name,
            )
            for name in attentions()
            if name != "reference"
        ),
        *(
            (
                f"attention against the oracle, {kind}",
                name + suffix,
                most,
                attention_error,
                attend,
                *masks,
                dtype,
            )
            for kind, masks in attention_masks().items()
            for dtype, suffix, most in DTYPES
            for name, attend in attentions().items()
        ),
        *(
            (f"sharded against one device, {what}", column, TOLERANCE, error, case, sizes)
            for column, sizes in MESHES.items()
            for what, error in {"logits": sharded_error, "training": sharded_training_error}.items()
        ),
    ]
    return [
        Check("equalities", row, column, functools.partial(error, *arguments), tolerance)
        for row, column, tolerance, error, *arguments in rows
    ]


def cache_error(case: Case, chunks: Chunks) -> float:
    """Logits of tokens fed in chunks to a cache, against one forward."""
    return worst_error(_fed(case, chunks), case.forward())


def ragged_error(case: Case, lengths: Lengths) -> float:
    """Rows of several lengths prefilled together and continued by a token each, against one forward of each alone."""
    together = _prompted(case, lengths)
    alone = (case._replace(tokens=row[None]).forward()[0] for row in case.tokens)
    return worst_error(
        together, [logits[: len(row)] for logits, row in zip(alone, together, strict=True)]
    )


def padding_error(case: Case, lengths: Lengths) -> float:
    """A ragged batch with other padding and unused slots, and its first row with other, full mates: exactly equal."""
    plain, padded = _prompted(case, lengths), _prompted(case, lengths, seed=1)
    mates, full = (
        (case.tokens + 1) % case.config.vocab_size,
        np.full_like(lengths, case.tokens.shape[1]),
    )
    mates[0], full[0] = case.tokens[0], lengths[0]
    return worst_error(
        [*padded, _prompted(case._replace(tokens=mates), full)[0]], [*plain, plain[0]]
    )


def _prompted(case: Case, lengths: Lengths, seed: int = 0) -> list[Float[np.ndarray, "_ vocab"]]:
    """Each row's logits for its first ``lengths[b]`` tokens, prefilled, and for the next one, decoded."""
    logits = _fed(case, [(case.tokens.shape[1], lengths), (1, 1)], seed)
    return [row[: length + 1] for row, length in zip(logits, lengths, strict=True)]


def _fed(case: Case, chunks: Chunks, seed: int = 0) -> Float[np.ndarray, "rows seq vocab"]:
    """Logits of tokens fed to a cache in chunks, NaN if never fed; padding and unused slots hold what none may see."""
    rng, (rows, seq), config = np.random.default_rng(seed), case.tokens.shape, case.config
    cache = jax.tree.map(
        lambda leaf: (
            jnp.asarray(1e4 * rng.standard_normal(leaf.shape), leaf.dtype)
            if leaf.ndim == 4
            else leaf
        ),
        KVCache.zeros(config, rows, seq + 8),
    )
    params, done = case.decode_params, np.zeros(rows, int)
    logits = np.full((rows, seq, config.vocab_size), np.nan)
    for width, most in chunks:
        if not (counts := np.minimum(most, seq - done)).any():
            continue
        chunk = rng.integers(0, config.vocab_size, (rows, width))
        row, column = np.nonzero(np.arange(width) < counts[:, None])
        chunk[row, column] = case.tokens[row, done[row] + column]
        new, cache = case.implementation.extend(
            config, params, jnp.asarray(chunk), cache, jnp.asarray(counts)
        )
        logits[row, done[row] + column] = np.asarray(new)[row, column]
        done += counts
    return logits


def packed_error(case: Case, segments: Tokens) -> float:
    """Documents packed in rows, each a run of one number in ``segments``, against each at the start of a row."""
    packed, errors = case.forward(segments), []
    for number in np.unique(segments):
        inside = segments == number
        at_start = np.arange(inside.shape[1]) < inside.sum(axis=1, keepdims=True)
        alone = np.zeros_like(case.tokens)
        alone[at_start] = case.tokens[inside]  # the zeros after it are not seen
        rows = zip(packed, inside, case._replace(tokens=alone).forward(), at_start, strict=True)
        errors += [
            relative_error(actual[here], expected[there]) for actual, here, expected, there in rows
        ]
    return float(np.max(errors))


def choice_error(case: Case, segments: Tokens, attention: str) -> float:
    """Packed documents by an attention implementation, against the reference."""
    return worst_error(
        *(case.forward(segments, attention=name) for name in (attention, "reference"))
    )


def layouts_error(case: Case) -> float:
    """The training layout, whose layers are scanned, against the decoding layout, whose layers are unrolled."""
    scanned = case.implementation.forward(
        case.config, jax.tree.map(jnp.asarray, case.params), jnp.asarray(case.tokens)
    )
    return relative_error(scanned, case.forward())


def bfloat16_error(case: Case, positions: Tokens) -> float:
    """Logits from weights rounded to bfloat16, and so activations in bfloat16, against those from the weights."""
    rounded = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), case.params)
    return worst_error(
        *(each.forward(None, positions) for each in (case._replace(params=rounded), case))
    )


@functools.cache
def loss_and_gradients(implementation: Implementation) -> Callable[..., tuple[Array, Params]]:
    """``implementation.loss`` and its gradient for every parameter, compiled."""
    return jax.jit(
        jax.value_and_grad(implementation.loss, argnums=1), static_argnames=("config", "remat")
    )


def remat_error(case: Case, part: Literal[0, 1]) -> float:
    """The loss (0) or the gradients (1) with activations computed again in the backward pass, against those kept."""
    compute, arguments = (
        loss_and_gradients(case.implementation),
        (*case[1:], np.ones_like(case.tokens[:, 1:], bool)),
    )
    return worst_error(
        *(jax.tree.leaves(compute(*arguments, remat=remat)[part]) for remat in (True, False))
    )


def attentions() -> dict[str, Attention]:
    """The registered implementations that this platform has."""
    names = [name for name, it in F.ATTENTION.items() if it.platform in ("", jax.default_backend())]
    return {name: functools.partial(F.attention, implementation=name) for name in names}


def attention_masks(seq: int = 160) -> dict[str, tuple[F.Mask, Dense]]:
    """Who sees whom in two rows, by the kind of mask, also densely; in the last, the queries of one row see nothing."""
    segments, keys = np.sort(np.random.default_rng(0).integers(0, 3, (2, seq))), np.arange(seq)
    lengths, offset, causal = np.array([seq // 3, 0]), np.array([5, 70]), np.tri(seq, dtype=bool)
    make: Any = F.Mask  # of NumPy's arrays, to begin with
    masks = {
        "causal": (make(), causal),
        "packed documents": (
            make(None, segments, segments),
            causal & (segments[:, :, None] == segments[:, None]),
        ),
        "after other tokens": (make(offset), keys <= offset[:, None, None] + keys[:, None]),
        "ragged lengths": (
            make(np.array([seq]), lengths=lengths),
            (keys < lengths[:, None])[:, None],
        ),
    }
    shape = (2, seq, seq)
    return {
        kind: (jax.tree.map(jnp.asarray, m), np.broadcast_to(dense, shape))
        for kind, (m, dense) in masks.items()
    }


def attention_error(
    attend: Attention, mask: F.Mask, dense: Dense, dtype: Any = jnp.float32, seed: int = 0
) -> float:
    """Attention under a mask against the float64 oracle's on the same random inputs, for each of ``KV_HEADS``."""
    rng, (rows, seq, kv_seq) = np.random.default_rng(seed), dense.shape
    shapes = [((HEADS, seq), (kv_heads, kv_seq), (kv_heads, kv_seq)) for kv_heads in KV_HEADS]
    inputs = [
        [jnp.asarray(rng.standard_normal((rows, *each, HEAD_DIM)), dtype) for each in three]
        for three in shapes
    ]
    actual = jax.jit(lambda inputs, mask: [attend(q, k, v, mask) for q, k, v in inputs])(
        inputs, mask
    )
    exact = ([np.asarray(array, np.float64) for array in arrays] for arrays in inputs)
    expected = [
        [oracle.attention(*row) for row in zip(*arrays, dense, strict=True)] for arrays in exact
    ]
    return worst_error(np.concatenate(actual), np.concatenate(expected))


def one_device_and(sizes: MeshConfig) -> tuple[Mesh, Mesh]:
    """The mesh of one simulated CPU device, and one of eight; ``JllamaError`` if JAX was not told to make as many."""
    if len(devices := jax.devices("cpu")) < 8:
        raise JllamaError(
            f"JAX has {len(devices)} CPU devices; sharding needs 8: set JAX_NUM_CPU_DEVICES=8"
        )
    return make_mesh(MeshConfig(1, 1, 1), devices[:1]), make_mesh(sizes, devices[:8])


def sharded_error(case: Case, sizes: MeshConfig) -> float:
    """Logits computed on eight devices against those computed on one."""

    def logits(mesh: Mesh) -> Array:
        params = jax.device_put(case.params, state_sharding(mesh, case.config, case.params))
        return case.implementation.forward(
            case.config, params, jax.device_put(case.tokens, NamedSharding(mesh, BATCH))
        )

    one, eight = map(logits, one_device_and(sizes))
    return worst_error(eight, one)


def sharded_training_error(case: Case, sizes: MeshConfig) -> float:
    """Losses and parameters of training on eight devices against those on one."""
    runs = (trained(case.config, mesh) for mesh in one_device_and(sizes))
    one, eight = ([*losses, *jax.tree.leaves(state.params)] for state, losses in runs)
    return worst_error(eight, one)


def short_training(config: LlamaConfig, mesh: Mesh, **options: Any) -> Training:
    """The programs of a training of three steps, compiled without optimization, as compiling takes most of its time.

    Epsilon is large, as AdamW makes of a difference of 1e-7 (the order of the sums) ``learning_rate * 1e-7 / epsilon``.
    """
    optimizer, loop = (
        OptimizerConfig(learning_rate=3e-2, epsilon=1e-2),
        LoopConfig(steps=3, dtype="float32", **options),
    )
    run = TrainConfig(config, optimizer=optimizer, training=loop)
    return compile_training(run, mesh, compiler_options={"xla_backend_optimization_level": 0})


@functools.cache
def trained(config: LlamaConfig, mesh: Mesh) -> tuple[TrainState, list[float]]:
    """The state after ``short_training``, and each step's loss in nats per token."""
    return after_steps(short_training(config, mesh), config)


def after_steps(training: Training, config: LlamaConfig) -> tuple[TrainState, list[float]]:
    """The state after three steps on random tokens, and each step's loss."""
    losses = []
    state = training.init(jax.random.key(0))
    for windows in (
        np.random.default_rng(0).integers(1, config.vocab_size, (3, 8, 17)).astype(np.int32)
    ):
        state, metrics = training.step(state, text_batch(windows, bos_id=1))
        losses.append(float(metrics.loss))
    return state, losses
