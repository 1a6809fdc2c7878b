"""A loaded model, which formats and generation share."""

import dataclasses
from collections.abc import Sequence
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jllama.core import UsageError
from jllama.core.config import LlamaConfig
from jllama.core.model import TokenIds, as_token_ids
from jllama.core.parameters import Params
from jllama.models.build import build_model
from jllama.models.decode_params import DecodeParams, Quantization, decode_layout
from jllama.system.errors import no_tokenizer
from jllama.tokenizers.base import Tokenizer


@dataclasses.dataclass(frozen=True)
class LanguageModel:
    """A loaded model; calling it with token ids returns logits.

    Args:
        config: the architecture.
        params: in the layout for training (``jllama.core.parameters``) or for decoding
            (``DecodeParams``).
        tokenizer: None if the files have none.
        chat_template: the Jinja template that turns messages into a prompt, if the files have one.
        stop_ids: tokens that end a text; the tokenizer's EOS if the files name none.
        step: for a training run, the step of the parameters.
        source: the name of the file or folder that it was loaded from.
        stored: the dtype of the matrices in the files, such as ``bfloat16``, or GGML's type.

    Examples:
        >>> model = jllama.load("smollm2/")
        >>> model([[1, 2, 3]]).shape
        (1, 3, 300)
    """

    config: LlamaConfig
    params: Params | DecodeParams
    tokenizer: Tokenizer | None = None
    chat_template: str | None = None
    stop_ids: tuple[int, ...] = ()
    step: int | None = None
    source: str = ""
    stored: str = "float32"

    def __repr__(self) -> str:
        """Return one line without the weights."""
        from jllama.models.presets import summary

        largest = max(jax.tree.leaves(self.params), key=lambda leaf: leaf.size, default=None)
        dtype = "no weights" if largest is None else largest.dtype.name
        if dtype == "uint8":  # blocks, as in the file
            dtype = self.stored
        source = f", from {self.source}" if self.source else ""
        return f"LanguageModel({summary(self.config, dtype, self.tokenizer)}{source})"

    def __call__(self, tokens: TokenIds) -> Float[Array, "batch seq vocab"]:
        """Return float32 logits of the token that follows each token.

        Raises:
            UsageError: ``tokens`` are not ids of this model.
        """
        return _logits(self.config, self.params, as_token_ids(tokens, self.config))

    def capture(
        self,
        tokens: TokenIds,
        names: Sequence[str],
        segments: Int[Array | np.ndarray, "batch seq"] | None = None,
    ) -> dict[str, Array]:
        """Return activations and attention weights of whole sequences, by name.

        Arrays are ``[batch, seq, embed]`` in the dtype of the weights: ``embedding``, the input of
        the first layer; ``layers/3``, the output of layer 3 (from 0); ``layers/3/attention`` and
        ``layers/3/feed_forward``, which layer 3 adds to its input one after the other; and
        ``final_norm``, the input of the head. ``layers/3/attention_weights`` is ``[batch, heads,
        seq, seq]`` in float32: the weight of each key for each query. ``layers/3/experts`` is
        ``[batch, seq, experts_per_token]``: the indices of each token's experts, the likeliest
        first. Other activations are not stored, and computed only where a requested one needs them.

        Args:
            tokens: token ids.
            names: names of activations.
            segments: numbers that tell packed documents apart.

        Raises:
            UsageError: a name is unknown, or ``tokens`` are not ids of this model.

        Example::

            activations = model.capture([[1, 15, 8]], ["layers/3", "layers/0/attention_weights"])
            print(activations["layers/3"].shape)
        """
        from jllama.models.capture import activations, check_names

        names = tuple(names)
        check_names(self.config, names)
        segments = None if segments is None else jnp.asarray(segments)
        ids = as_token_ids(tokens, self.config)
        captured = activations(self.config, self.params, ids, names, segments)
        return {name: captured[name] for name in names}  # compiled functions sort them

    @property
    def text_tokenizer(self) -> Tokenizer:
        """``tokenizer`` for work on text; raises ``JllamaError`` if there is none."""
        if self.tokenizer is None:
            raise no_tokenizer("the model")
        return self.tokenizer

    @property
    def decode_params(self) -> DecodeParams:
        """``params`` in the layout for decoding; others are converted at each call."""
        if isinstance(self.params, DecodeParams):
            return self.params
        return decode_layout(self.params, self.config)

    def for_decoding(self, quantize: Quantization | None = None) -> "LanguageModel":
        """Return the same model in the layout for decoding (``decode_layout``).

        Args:
            quantize: ``int8`` quantizes the matrices.

        Raises:
            UsageError: ``quantize`` is unknown, or the parameters are in this layout in floats.
        """
        kinds = get_args(Quantization)
        if quantize not in (None, *kinds):
            raise UsageError(
                f"quantize is {quantize!r}; it must be one of {', '.join(kinds)}, or None"
            )
        if not isinstance(self.params, DecodeParams):
            params = decode_layout(self.params, self.config, quantize)
            return dataclasses.replace(self, params=params)
        if quantize and not self.params.quantized:
            raise UsageError(
                "the parameters are in the layout for decoding: quantize when loading them"
            )
        return self


_logits = jax.jit(
    lambda config, params, tokens: build_model(config, params)(tokens), static_argnums=0
)
