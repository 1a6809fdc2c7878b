"""Runs in this folder write their pages without charts."""

import pytest


@pytest.fixture(autouse=True, scope="module")
def no_charts():
    """Charts are a quarter of the time of runs so short; tests/commands reads pages with them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jllama.report._chart", lambda runs, key, title: title)
        yield
