"""Small models that many tests share, with weights under which mistakes show; made and compiled once a process."""

import functools

import jax
import jax.numpy as jnp

from jllama.checkpoints import registry
from jllama.config import LlamaConfig
from jllama.decode_params import decode_layout
from jllama.language_model import LanguageModel
from jllama.templates.messages import TEMPLATES
from jllama.tokenizers import BytesTokenizer
from jllama.verify.checks import random_params
from jllama.verify.conformance import implementation_of, jllama_itself

SMALL = LlamaConfig(
    vocab_size=61,
    num_layers=2,
    embed_dim=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    mlp_dim=96,
    max_seq_len=64,
)
"""For what takes many steps: heads are as wide together as twice the embedding, and share keys and values."""
LONG = LlamaConfig(
    vocab_size=97,
    num_layers=2,
    embed_dim=128,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    mlp_dim=160,
    max_seq_len=512,
)
"""For what positions do: enough channels in a head, and enough positions, for a wrong angle to move the logits."""
FILE = LlamaConfig(
    vocab_size=300,
    num_layers=2,
    embed_dim=32,
    num_heads=4,
    num_kv_heads=2,
    mlp_dim=48,
    max_seq_len=64,
)
"""For what is written and read: as many tokens as a small SentencePiece model has, and sizes that llama2.c can hold."""
SERVED = LlamaConfig(
    vocab_size=259,
    num_layers=2,
    embed_dim=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    mlp_dim=96,
    max_seq_len=1024,
)
"""For the server: the byte tokenizer's tokens, and a context of four chunks."""

forward, extend = jllama_itself().forward, jllama_itself().extend
"""``forward(config, params, tokens, ...)``, ``extend(config, decode_params, tokens, cache, counts)``."""


@functools.cache
def weights(config):
    """Float32 NumPy arrays in the training layout."""
    return random_params(config, 0)


@functools.cache
def params(config, dtype="float32"):
    """The same on the device, in any dtype."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), weights(config))


@functools.cache
def decode_params(config, dtype="float32", quantize=None):
    """The same in the layout for decoding."""
    return decode_layout(params(config, dtype), config, quantize)


@functools.cache
def served(seed=0, dtype="float32", quantize=None):
    """A model of ``SERVED`` with a tokenizer, in the layout for decoding; other seeds are other weights."""
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), random_params(SERVED, seed))
    model = LanguageModel(
        SERVED, params, BytesTokenizer(), TEMPLATES["chatml"], (BytesTokenizer.eos_id,)
    )
    return model.for_decoding(quantize)


def planted(mutation):
    """The implementation, loading included, that makes one of ``jllama.verify.mutations``' mistakes."""

    def load(path, layout, rope_factor):
        model = registry.load(path, layout="training", rope_factor=rope_factor)
        config, params = mutation.misread(model.config, model.params)
        params = jax.tree.map(jnp.asarray, params)
        return LanguageModel(
            config, decode_layout(params, config) if layout == "decode" else params
        )

    return implementation_of(mutation.model)._replace(load=load)
