"""Runs pytest or unittest, and tells which tests passed: test_runner.py RESULTS pytest|unittest ARGUMENTS

RESULTS is a file descriptor. Each line that is written there begins with the key that stands on standard input. An exit
code says less: `os._exit(0)` in the code under test makes it 0. So does what is printed, which that code can print,
too. A test counts only while the test runner's own functions are as they were; else the line has no test. The code
under test runs in this process: if it searches the memory for the key, or returns an object that equals everything, a
test passes that should not.
"""

import os
import sys
import types
import unittest

RUNNERS = ("unittest", "pytest", "_pytest", "pluggy", "__main__")


class Functions:
    """The functions of the test runners, as they were when this was made."""

    def __init__(self):
        self.found = []
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] not in RUNNERS:
                continue
            self.add(module)
            for part in list(vars(module).values()):
                if isinstance(part, type) and part.__module__ == name:
                    self.add(part)

    def add(self, holder):
        for name, value in vars(holder).items():
            function = plain(value)
            if isinstance(function, types.FunctionType):
                self.found.append((holder, name, function, function.__code__))

    def changed(self):
        """What is there now instead of those that are no longer the same."""
        found = []
        for holder, name, function, code in self.found:
            now = plain(vars(holder).get(name))
            if now is not function or now.__code__ is not code:
                found.append(now)
        return found


def plain(value):
    """A function without what makes it a static or a class method."""
    return getattr(value, "__func__", value)


def is_installed(value):
    """Whether it is a function of a package outside of the repository: plugins of pytest change functions of it."""
    file = getattr(getattr(value, "__code__", None), "co_filename", "")
    return os.path.isfile(file) and not os.path.realpath(file).startswith(os.getcwd() + os.sep)


class Teller:
    """Writes the passed tests. It keeps the key in no attribute."""

    def __init__(self, key, results):
        functions = Functions()
        were_changed = False

        def tell(test):
            line = key
            if not were_changed and not functions.changed():
                line += " " + test
            os.write(results, (line + "\n").encode(errors="replace"))

        def begin():
            """Plugins have been loaded, tests have not."""
            nonlocal functions, were_changed
            were_changed = not all(map(is_installed, functions.changed()))
            functions = Functions()

        self.tell = tell
        self.begin = begin


def run_pytest(arguments, key, results):
    import pytest

    teller = Teller(key, results)

    class Reporter:
        """A plugin of pytest. A test has passed after its teardown. One that fails as it is expected to has passed if
        the expectation is the test's own: code under test can call pytest.xfail."""

        def __init__(self):
            self.passed = set()
            self.not_own = set()

        def pytest_collection(self):
            teller.begin()

        def pytest_runtest_makereport(self, item, call):
            if call.excinfo is not None and isinstance(call.excinfo.value, pytest.xfail.Exception):
                paths = [str(entry.path) for entry in call.excinfo.traceback]
                callers = [path for path in paths if path != sys.modules["_pytest.outcomes"].__file__]
                if callers[-1:] != [str(item.fspath)]:
                    self.not_own.add(item.nodeid)

        def pytest_runtest_logreport(self, report):
            expected_failure = hasattr(report, "wasxfail") and report.nodeid not in self.not_own
            if report.when == "call" and (report.passed or expected_failure):
                self.passed.add(report.nodeid)
            if report.when == "teardown" and report.passed and report.nodeid in self.passed:
                teller.tell(report.nodeid)

    sys.path[0] = os.getcwd()  # as `python -m pytest` has it, but after pytest: a file of this name is not taken for it
    return pytest.main(["-p", "no:cacheprovider", *arguments], plugins=[Reporter()])


def run_unittest(arguments, key, results):
    teller = Teller(key, results)

    class Result(unittest.TextTestResult):
        """A test with subtests has passed if all of them have."""

        def addSuccess(self, test):
            super().addSuccess(test)
            teller.tell(test.id())

    sys.path[0] = os.getcwd()
    runner = unittest.TextTestRunner(verbosity=2, resultclass=Result)  # type: ignore[arg-type]
    program = unittest.main(module=None, argv=["python -m unittest", *arguments], testRunner=runner, exit=False)
    return int(not program.result.wasSuccessful())


def main():
    key = sys.stdin.readline().strip()
    kinds = {"pytest": run_pytest, "unittest": run_unittest}
    sys.exit(kinds[sys.argv[2]](sys.argv[3:], key, int(sys.argv[1])))


main()
