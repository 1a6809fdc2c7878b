"""What tests that lm-eval judges share: its package, offline, and random models with tokenizers and
a chat template.

They are marked ``lm_eval``, as it takes 480 MB of packages: ``pip install -e '.[eval]'``, then
``python -m pytest -m lm_eval``.
"""

import dataclasses
import os

import jax
import jax.numpy as jnp
import pytest

# Read when lm-eval is imported.
os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install -e '.[eval]'")
pytest.importorskip("tenacity", reason="lm-eval's client is not: pip install -e '.[eval]'")
pytest.importorskip("accelerate", reason="accelerate is not installed: pip install -e '.[eval]'")

from helpers import trained_smollm
from lm_eval.models.huggingface import HFLM
from models import SMALL

import jllama
from jllama.lab.checks import random_params
from jllama.models.language_model import LanguageModel
from jllama.tokenizers.sentencepiece import train_sentencepiece

SENTENCES = [
    "the cat sat on the mat, and the other cats sat on the other mats",
    "naïve café, où est le garçon? 世界 🙂 the dog is on the mat",
    "a question is asked: what is it that sat on the mat? the answer is a cat",
]
CHAT = (
    "{{ bos_token }}{% for m in messages %}"
    "[{{ m.role }}] {{ m.content | trim }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
TOKENIZERS = {
    "without BOS": trained_smollm(SENTENCES, 300),
    "with BOS": train_sentencepiece([f"{s}\n" for s in SENTENCES], 310),
}


def random_model(name: str, max_seq_len: int) -> LanguageModel:
    """Return a random model with the tokenizer of this name."""
    tokenizer = TOKENIZERS[name]
    assert tokenizer.add_bos is (name == "with BOS")
    config = dataclasses.replace(SMALL, vocab_size=310, max_seq_len=max_seq_len)
    params = random_params(config, 0)
    # Never the likeliest: single bytes, of which runs that are no text decode differently in
    # pieces; and ids that the tokenizer does not have, which transformers does draw.
    params["lm_head"][:, 3:259] = params["lm_head"][:, tokenizer.vocab_size :] = 0
    params = jax.tree.map(jnp.asarray, params)
    return LanguageModel(config, params, tokenizer, CHAT, (tokenizer.eos_id,))


def hugging_face_model(model: LanguageModel, folder, kind: type[HFLM] = HFLM) -> HFLM:
    """Return lm-eval's own Hugging Face model with the same weights and tokenizer."""
    jllama.save(model, folder, "hf")
    return kind(pretrained=str(folder), device="cpu", dtype="float32", batch_size=3)
