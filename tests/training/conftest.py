"""Runs in this folder write their pages without charts, and share programs."""

import pytest
import tuning


@pytest.fixture(autouse=True, scope="module")
def quick_runs():
    """Tracing a step again is most of the time of a run so short, and charts are a quarter of the
    rest; tests/commands reads pages with them.
    """
    with pytest.MonkeyPatch.context() as patch, tuning.shared_programs():
        patch.setattr("jllama.report._chart", lambda runs, key, title: title)
        yield
