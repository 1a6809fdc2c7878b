"""Where the tests marked ``real_weights`` find their files, and what they ask of a real model."""

import base64
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from fetch_real_weights import real_weights_folder

from jllama.generation.generate import generate
from jllama.generation.sampling_params import SamplingParams
from jllama.tokenizers.base import BYTE_CHARS, TokenType, Vocabulary, merges_of_ranks
from jllama.tokenizers.huggingface import HuggingFaceTokenizer

ROOT = Path(__file__).parent.parent
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
TEXT = (ROOT / "LICENSE").read_text()


def greedy(model, prompt, count=64):
    """Greedy tokens, through the stop that ends them if there is one."""
    (completion,) = generate(model, [prompt], SamplingParams(temperature=0.0), max_new_tokens=count)
    return completion.ids + ([model.stop_ids[0]] if completion.finish_reason == "stop_id" else [])


def real_file(name: str) -> Path:
    """A file that ``fetch_real_weights.py`` fetches; the test is skipped where it has not been."""
    path = real_weights_folder() / name
    if not path.is_file():
        pytest.skip(f"{path} is not there: python tests/fetch_real_weights.py fetches it")
    return path


def ranks_of(name: str) -> list[bytes]:
    """The tokens of a file of tiktoken's, by rank."""
    lines = real_file(name).read_bytes().splitlines()
    return [base64.b64decode(line.split()[0]) for line in lines]


def from_ranks(
    ranks: Sequence[bytes],
    special: Sequence[str],
    pre: str,
    ends: tuple[str, str],
    first_special: bool = False,
) -> HuggingFaceTokenizer:
    """A byte-level BPE of tiktoken's ranks, with special tokens behind or in front of them."""
    texts = ["".join(BYTE_CHARS[byte] for byte in token) for token in ranks]
    merges = merges_of_ranks(texts, {text: rank for rank, text in enumerate(texts)})
    tokens = [*special, *texts] if first_special else [*texts, *special]
    kinds = [TokenType.CONTROL if text in special else TokenType.NORMAL for text in tokens]
    bos_id, eos_id = map(tokens.index, ends)
    vocabulary = Vocabulary(tokens, kinds, bos_id, eos_id, first_special, merges=merges, pre=pre)
    return HuggingFaceTokenizer.from_vocabulary(vocabulary)


QWEN_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PHI_TOKENS = (*QWEN_TOKENS, "<|im_sep|>", "<|system|>", "<|user|>", "<|assistant|>")
PHI_TOKENS += ("<|end|>", "<|tool|>")
GRANITE_TOKENS = ("<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>")
_TOOLS = "AVAILABLE_TOOLS", "/AVAILABLE_TOOLS", "TOOL_RESULTS", "/TOOL_RESULTS", "TOOL_CALLS"
MISTRAL_TOKENS = ("<unk>", "<s>", "</s>", *(f"[{name}]" for name in ("INST", "/INST", *_TOOLS)))


def real_qwen() -> HuggingFaceTokenizer:
    return from_ranks(
        ranks_of("qwen.tiktoken"), QWEN_TOKENS, "qwen2", (QWEN_TOKENS[0], QWEN_TOKENS[2])
    )


def real_cl100k() -> HuggingFaceTokenizer:
    """The ranks of Phi-4 and OLMo 2; their special tokens are others."""
    return from_ranks(ranks_of("cl100k_base.tiktoken"), PHI_TOKENS, "dbrx", ("<|endoftext|>",) * 2)


def real_o200k() -> HuggingFaceTokenizer:
    """The ranks of Phi-4-mini; its special tokens are others."""
    return from_ranks(ranks_of("o200k_base.tiktoken"), PHI_TOKENS, "gpt-4o", ("<|endoftext|>",) * 2)


def real_tekken() -> HuggingFaceTokenizer:
    """Mistral Nemo's, from the file of Mistral's own library."""
    content = json.loads(real_file("tekken.json").read_bytes())
    config = content["config"]
    num_special = config["default_num_special_tokens"]
    count = config["default_vocab_size"] - num_special
    ranks = [base64.b64decode(token["token_bytes"]) for token in content["vocab"][:count]]
    spare = (f"<SPECIAL_{id}>" for id in range(len(MISTRAL_TOKENS), num_special))
    special = [*MISTRAL_TOKENS, *spare]
    return from_ranks(ranks, special, "tekken", ("<s>", "</s>"), first_special=True)
