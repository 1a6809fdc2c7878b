"""Text that tokenizers get wrong, and SentencePiece models of any kind."""

import io

import sentencepiece
from hypothesis import strategies as st

HARD = [
    "",
    " ",
    "\n",
    "Hello world",
    " leading",
    "  two  spaces   three",
    "trailing  ",
    "\ttab\n\nnewlines\r\n",
    "1234567890 3.14 1,000 2²",
    "don't I'LL we've they'D",
    "<s> </s> <unk> <0x0A> <|begin_of_text|> <|end_of_text|> <|im_start|>user<|im_end|> "
    "<|endoftext|>",
    "héllo ñandú Zürich",
    "日本語テキスト 你好，世界 1999年",
    "العربية עברית",
    "👩‍👩‍👧 🏳️‍🌈 emoji 😀",
    "e\u0301 combining",
    "\x00\x01\x1b\x7f",
    "\u200b zero width\ufeff \u00a0 no break",
    "ﬁ ligature ① Ⅷ",
    "\ud7ff\U0010ffff",
    "a" * 300,
    " " * 50,
    "def f(x):\n    return x**2  # ½ of it\n",
]
"""What a special token's name spells out must be encoded as text."""

WORDS = ["the user", "é", "世界", "👩‍👩‍👧", "12", "[INST]", "{{ x }}", "don't", "☀"]
WORDS += [" ", "  ", "\n", "\n\n", "\t", "\0"]
WORDS += ["</s>", "<s>", "<unk>", "<|im_end|>", "<|eot_id|>", "<|im_", "|>"]
WORDS += ["<|im_start|>assistant\n"]
CHARACTERS = st.characters(exclude_categories=["Cs"], exclude_characters="\u2581")
PARTS = st.sampled_from(WORDS) | st.text(CHARACTERS, max_size=5)
texts = st.lists(PARTS, max_size=6).map("".join)
"""Contents of messages, without U+2581, SentencePiece's for a space."""
CHAT_CORPUS = [
    "the system says hello to the user and the assistant, don't they? 12 345\n\n  user\n héllo "
    "世界 [INST] <<SYS>>\n" * 20
]
"""What the small tokenizers of chats are trained on."""


def trained_model(sentences, vocab_size, **options):
    """A model as the library trains it."""
    model = io.BytesIO()
    options = {"vocab_size": vocab_size, "minloglevel": 2} | options
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences), model_writer=model, **options
    )
    return model.getvalue()
