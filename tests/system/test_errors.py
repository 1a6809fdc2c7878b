"""What errors say can be shown in a terminal, whatever is in the files that they are about."""

import pytest

from jllama.core import JllamaError, UsageError, printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain \u00e9\u4f60 \U0001f999\ntext", "plain \u00e9\u4f60 \U0001f999\\ntext"),
        ("\x1b[2Jgone\x07\r", "\\x1b[2Jgone\\x07\\r"),
        ("\u202etxt.exe\x9b31m\ud800", "\\u202etxt.exe\\x9b31m\\ud800"),
        ("p" * 499, "p" * 499),
        (f"a {'n' * 100_000} b", f"a {'n' * 200}...{'n' * 200} b"),
        ("word " * 20_000 + "end", "word " * 800 + " ... " + ("word " * 300 + "end")[-1500:]),
    ],
    ids=["text", "control", "format", "path", "name", "words"],
)
def test_a_text_for_a_terminal(text, shown):
    assert printable(text) == printable(shown) == shown
    for error in (JllamaError, UsageError):
        assert str(error(text)) == shown


def test_an_error_may_have_more_lines():
    assert str(JllamaError("2 rows", "a\nb", "c")) == "2 rows\na\\nb\nc"
