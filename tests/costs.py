"""What each test file costs: ``python -m pytest -n 2 --costs`` prints a table at the end.

Programs are those that JAX has compiled or read from those kept; processes are those that a test
starts itself, with all of Python's or without, not those that these start.
"""

import collections
import dataclasses
import os
import resource
import sys
import time

import jax
import pytest

COLUMNS = {
    "programs": 10,
    "compiling_s": 12,
    "tracing_s": 10,
    "processes": 10,
    "cpu_s": 7,
    "children_s": 11,
    "wall_s": 7,
}
EVENTS = {
    "/jax/core/compile/backend_compile_duration": "compiling_s",
    "/jax/core/compile/jaxpr_trace_duration": "tracing_s",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "tracing_s",
}
COSTS = "costs"


@dataclasses.dataclass(eq=False)
class Costs:
    """A plugin: a worker counts, and the process that prints adds up."""

    spent: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    files: dict = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        sys.addaudithook(self.count_process)
        jax.monitoring.register_event_duration_secs_listener(self.count_program)

    def count_process(self, event, arguments):
        if event == "subprocess.Popen":
            self.spent["processes"] += 1

    def count_program(self, event, duration_s, **_):
        if name := EVENTS.get(event):
            self.spent[name] += duration_s
            self.spent["programs"] += name == "compiling_s"

    def total(self):
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        clocks = {
            "cpu_s": time.process_time(),
            "children_s": children.ru_utime + children.ru_stime,
            "wall_s": time.perf_counter(),
        }
        return self.spent + collections.Counter(clocks)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        item.stash[COSTS] = self.total()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        if call.when == "teardown":
            item.user_properties.append((COSTS, dict(self.total() - item.stash[COSTS])))
        return (yield)

    def pytest_runtest_logreport(self, report):
        if report.when == "teardown" and "PYTEST_XDIST_WORKER" not in os.environ:
            file = self.files.setdefault(report.nodeid.partition("::")[0], collections.Counter())
            file.update(dict(report.user_properties).get(COSTS, {}))

    def pytest_terminal_summary(self, terminalreporter):
        total = sum(self.files.values(), collections.Counter())
        rows = sorted(self.files.items(), key=lambda row: -row[1]["cpu_s"] - row[1]["children_s"])
        terminalreporter.write_line("".join(f"{name:>{width}}" for name, width in COLUMNS.items()))
        for name, costs in [*rows, ("all files", total)]:
            figures = [f"{costs[column]:{width}.0f}" for column, width in COLUMNS.items()]
            terminalreporter.write_line(f"{''.join(figures)}  {name}")
