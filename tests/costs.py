"""What each test file costs: ``python -m pytest -n 2 --costs`` prints a table at the end.

Programs are those that JAX has compiled or read from those kept; processes are those that a test
starts itself, with all of Python's or without, not those that these start.
"""

import collections
import os
import resource
import sys
import time

import jax
import pytest

TIMES = ["compiling_s", "tracing_s", "cpu_s", "children_s", "wall_s"]
COLUMNS = ["programs", "processes", *TIMES]
EVENTS = {
    "/jax/core/compile/backend_compile_duration": "compiling_s",
    "/jax/core/compile/jaxpr_trace_duration": "tracing_s",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "tracing_s",
}
COSTS = "costs"


class Costs:
    """A plugin: a worker counts, and the process that prints adds up."""

    def __init__(self):
        self.spent = collections.Counter()
        self.files = collections.defaultdict(collections.Counter)
        sys.addaudithook(self.count_process)
        jax.monitoring.register_event_duration_secs_listener(self.count_program)

    def count_process(self, event, arguments):
        self.spent["processes"] += event == "subprocess.Popen"

    def count_program(self, event, duration_s, **_):
        if name := EVENTS.get(event):
            self.spent[name] += duration_s
            self.spent["programs"] += name == "compiling_s"

    def total(self):
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        return self.spent + collections.Counter(
            cpu_s=time.process_time(),
            children_s=children.ru_utime + children.ru_stime,
            wall_s=time.perf_counter(),
        )

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
            costs = dict(report.user_properties).get(COSTS, {})
            self.files[report.nodeid.partition("::")[0]].update(costs)

    def pytest_terminal_summary(self, terminalreporter):
        total = sum(self.files.values(), collections.Counter())
        rows = sorted(self.files.items(), key=lambda row: -row[1]["cpu_s"] - row[1]["children_s"])
        terminalreporter.write_line("".join(f"{name:>13}" for name in COLUMNS))
        for name, costs in [*rows, ("all files", total)]:
            figures = "".join(f"{costs[column]:13.0f}" for column in COLUMNS)
            terminalreporter.write_line(f"{figures}  {name}")
