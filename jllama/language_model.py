"""A loaded model: architecture, parameters, tokenizer, chat template; what formats and generation share."""

import dataclasses
import hashlib
import zlib
from collections.abc import Sequence
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jllama.capture import activations, check_names
from jllama.config import LlamaConfig
from jllama.decode_params import DecodeParams, Quantization, decode_layout
from jllama.errors import UsageError, no_tokenizer
from jllama.model import TokenIds, as_token_ids, build_model
from jllama.parameters import Params, count_parameters
from jllama.presets import nearest_preset
from jllama.tokenizers import Tokenizer


@dataclasses.dataclass(frozen=True)
class LanguageModel:
    """A loaded model. Called on token ids it gives logits.

    Args:
        config: the architecture.
        params: in the training layout (``jllama.parameters``) or in the layout for decoding (``DecodeParams``).
        tokenizer: None if the files had none.
        chat_template: the Jinja template that turns messages into a prompt, if the files had one.
        stop_ids: tokens that end a text; the tokenizer's EOS if the files did not say.
        step: of a training run, the step that the parameters are from.
        source: the name of the file or folder that it was loaded from.
    """

    config: LlamaConfig
    params: Params | DecodeParams
    tokenizer: Tokenizer | None = None
    chat_template: str | None = None
    stop_ids: tuple[int, ...] = ()
    step: int | None = None
    source: str = ""

    def __repr__(self) -> str:
        """One line, without the weights."""
        largest = max(jax.tree.leaves(self.params), key=lambda leaf: leaf.size, default=None)
        shown = summary(
            self.config, "no weights" if largest is None else largest.dtype.name, self.tokenizer
        )
        return f"LanguageModel({shown}{f', from {self.source}' if self.source else ''})"

    def __call__(self, tokens: TokenIds) -> Float[Array, "batch seq vocab"]:
        """Float32 logits of the token that follows each one; ``UsageError`` if they are not ids of this model."""
        return _logits(self.config, self.params, as_token_ids(tokens, self.config))

    def capture(
        self,
        tokens: TokenIds,
        names: Sequence[str],
        segments: Int[Array | np.ndarray, "batch seq"] | None = None,
    ) -> dict[str, Array]:
        """Activations and attention weights by name, of whole sequences.

        ``embedding`` is the input of the first layer, ``layers/3`` the output of layer 3 (they count from 0) and
        ``final_norm`` what the head gets, each ``[batch, seq, embed]`` in the dtype of the weights, as are
        ``layers/3/attention`` and ``layers/3/feed_forward``, which layer 3 adds to its input, one after the other;
        ``layers/3/attention_weights`` is ``[batch, heads, seq, seq]`` in float32: how much each query takes of each
        key. What is not named is neither kept nor, where nothing named needs it, computed. ``segments`` are numbers
        that tell packed documents apart. ``UsageError`` for another name, and as for calling the model.

        Example::

            found = model.capture([[1, 15, 8]], ["layers/3", "layers/0/attention_weights"])
            print(found["layers/3"].shape)
        """
        check_names(self.config, tuple(names))
        segments = None if segments is None else jnp.asarray(segments)
        found = activations(
            self.config, self.params, as_token_ids(tokens, self.config), tuple(names), segments
        )
        return {name: found[name] for name in names}  # compiled functions sort them

    @property
    def text_tokenizer(self) -> Tokenizer:
        """``tokenizer``; what works on text cannot do without, and raises ``JllamaError`` here if there is none."""
        if self.tokenizer is None:
            raise no_tokenizer("the model")
        return self.tokenizer

    @property
    def decode_params(self) -> DecodeParams:
        """``params`` in the layout for decoding; if they are in the training layout, converted at each call."""
        return (
            self.params
            if isinstance(self.params, DecodeParams)
            else decode_layout(self.params, self.config)
        )

    def for_decoding(self, quantize: Quantization | None = None) -> "LanguageModel":
        """The same model with its parameters in the layout for decoding (``decode_layout``), as int8 if asked."""
        if quantize not in (None, *(kinds := get_args(Quantization))):
            raise UsageError(
                f"quantize is {quantize!r}; it must be one of {', '.join(kinds)}, or None"
            )
        if not isinstance(self.params, DecodeParams):
            return dataclasses.replace(
                self, params=decode_layout(self.params, self.config, quantize)
            )
        if quantize and not self.params.quantized:
            raise UsageError(
                "the parameters are in the layout for decoding: quantize when loading them"
            )
        return self


def summary(config: LlamaConfig, dtype: str, tokenizer: Tokenizer | None) -> str:
    """A model in a few words: the nearest released Llama, layers, parameters, dtype and size of the tokenizer."""
    tokens = f"tokenizer of {tokenizer.vocab_size:,} tokens" if tokenizer else "no tokenizer"
    sizes = f"{config.num_layers} layers, {count_parameters(config):,} parameters"
    return f"{nearest_preset(config) or 'llama'}, {sizes}, {dtype}, {tokens}"


def weights_fingerprint(model: LanguageModel) -> str:
    """SHA-256, in hexadecimal, of the names, types, shapes and CRC-32 of the parameters as they are loaded."""
    leaves = [
        (jax.tree_util.keystr(at), np.asarray(leaf))
        for at, leaf in jax.tree.leaves_with_path(model.params)
    ]
    parts = [
        (name, leaf.dtype.name, leaf.shape, zlib.crc32(leaf.ravel().view(np.uint8).data))
        for name, leaf in leaves
    ]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


_logits = jax.jit(
    lambda config, params, tokens: build_model(config, params)(tokens), static_argnums=0
)
