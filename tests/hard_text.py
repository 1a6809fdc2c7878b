"""Text that tokenizers get wrong."""

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


def texts_with(words):
    """Texts of these words and any characters except U+2581, SentencePiece's for a space."""
    characters = st.characters(exclude_categories=["Cs"], exclude_characters="\u2581")
    return st.lists(st.sampled_from(words) | st.text(characters, max_size=5), max_size=6).map(
        "".join
    )
