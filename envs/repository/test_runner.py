"""Runs pytest or unittest, and tells which tests passed: test_runner.py RESULTS pytest|unittest ARGUMENTS

RESULTS is a file descriptor. Each line that is written there begins with the key that stands on standard input. An exit
code says less: `os._exit(0)` in the code under test makes it 0. So does what is printed, which that code can print,
too. Code that searches this process's memory for the key could still write such lines.
"""

import os
import sys
import unittest

key = sys.stdin.readline().strip()
results = int(sys.argv[1])


def tell(test):
    os.write(results, (key + " " + test + "\n").encode(errors="replace"))


class Reporter:
    """A plugin of pytest. A test has passed after its teardown."""

    def __init__(self):
        self.passed = set()

    def pytest_runtest_logreport(self, report):
        expected_failure = hasattr(report, "wasxfail")
        if report.when == "call" and (report.passed or expected_failure):
            self.passed.add(report.nodeid)
        if report.when == "teardown" and report.passed and report.nodeid in self.passed:
            tell(report.nodeid)


class Result(unittest.TextTestResult):
    """A test with subtests has passed if all of them have."""

    def addSuccess(self, test):
        super().addSuccess(test)
        tell(test.id())


def run_pytest(arguments):
    import pytest

    sys.path[0] = os.getcwd()  # as `python -m pytest` has it, but after pytest: a file of this name is not taken for it
    return pytest.main(["-p", "no:cacheprovider", *arguments], plugins=[Reporter()])


def run_unittest(arguments):
    sys.path[0] = os.getcwd()
    runner = unittest.TextTestRunner(verbosity=2, resultclass=Result)  # type: ignore[arg-type]
    program = unittest.main(module=None, argv=["python -m unittest", *arguments], testRunner=runner, exit=False)
    return int(not program.result.wasSuccessful())


kinds = {"pytest": run_pytest, "unittest": run_unittest}
sys.exit(kinds[sys.argv[2]](sys.argv[3:]))
