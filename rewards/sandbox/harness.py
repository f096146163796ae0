"""What runs inside the sandbox around a model-written program; the text of this file is the main part of its main.py.

    run     the program as a script that reads standard input
    serve   the program as a module; calls of its functions come as JSON lines on standard input, replies go back
    judge   assertions (on standard input) in a process of their own, which starts `serve` and calls the program there

The program never shares a process with the expected values or with the verdict. Between the processes only data
passes: a reply is rebuilt from JSON as exactly a list, tuple, int, ..., so no object of the program, with an `==` of
its own, is ever compared. What is no data (a class, a generator) stays in the program's process, and `judge` has a
`Handle` of it, which equals nothing but itself. What the program can still do is answer the calls, rightly or wrongly.
"""

import builtins
import collections
import datetime
import decimal
import fractions
import importlib
import operator
import os
import sys
import types
from json import dumps, loads

# What such tasks take for granted: all names of these modules, the last one's where several have a name, then modules.
STARRED = ("math", "collections", "itertools", "functools", "heapq", "bisect", "typing", "builtins")
MODULES = ("bisect, collections, copy, datetime, functools, heapq, io, itertools, json, math, operator, random, re, "
           "string, sys")
# Programs get these too, as LiveCodeBench's and APPS' harnesses give them. Assertions do not: a name that they have by
# themselves is rarely taken from the program (asked.py), and `add` or `mode` is to be the program's.
STARRED_IN_PROGRAMS = ("string", "re", "datetime", "copy", "random", "statistics", "operator", "io", "sys", "json")
MODULES_IN_PROGRAMS = "fractions, statistics, time"
CANNOT_JUDGE = 90         # exit code of `judge` where an assertion needs what cannot pass between the processes
MAX_REPLY = 32 << 20      # characters
# name: (type, its items, the type from its items)
CONTAINERS = {
    "list": (list, list.__iter__, list),
    "tuple": (tuple, tuple.__iter__, tuple),
    "set": (set, set.__iter__, set),
    "frozenset": (frozenset, frozenset.__iter__, frozenset),
    "deque": (collections.deque, collections.deque.__iter__, collections.deque),
    "dict": (dict, dict.items, dict),
    "bytes": (bytes, bytes.__iter__, bytes),
    "bytearray": (bytearray, bytearray.__iter__, bytearray),
    "range": (range, lambda value: (value.start, value.stop, value.step), lambda items: range(*items)),
    "slice": (slice, lambda value: (value.start, value.stop, value.step), lambda items: slice(*items)),
}
# name: (type, the type from its text)
TEXTS = {
    "complex": (complex, complex),
    "Fraction": (fractions.Fraction, fractions.Fraction),
    "Decimal": (decimal.Decimal, decimal.Decimal),
    "datetime": (datetime.datetime, datetime.datetime.fromisoformat),
    "date": (datetime.date, datetime.date.fromisoformat),
}


def pack(value, refer):
    """A value as JSON: None, bool, int, float and str as they are, all else [kind, ...], what is no data as `refer`
    has it. A subclass of a container or number is packed as its base."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    for name, (base, items, _) in CONTAINERS.items():
        if isinstance(value, base):
            return [name, *(pack(item, refer) for item in items(value))]
    for name, (base, _) in TEXTS.items():
        if isinstance(value, base):
            return [name, str(value)]
    return refer(value)


def unpack(data, resolve):
    """The value that was packed, of exactly a built-in type. Raises for data that `pack` does not make."""
    if not isinstance(data, list):
        return data
    name, *items = data
    if name == "handle":
        return resolve(*items)
    if name in TEXTS:
        return TEXTS[name][1](*items)
    return CONTAINERS[name][2](unpack(item, resolve) for item in items)


def import_into(names: dict, starred: tuple, modules: str) -> None:
    for module in starred:
        exec(f"from {module} import *", names)
    exec(f"import {modules}", names)


# --------------------------------------------------------------------------- the program's process

def load(program: str, name: str) -> dict:
    """Execute the program as a module of this name; what it defined. What it takes for granted is no part of its
    module but lies below it, where Python's own names are. So a method that is called `search` or `add` is told from a
    function of re or operator, and what the program imported itself counts as the program's."""
    module = types.ModuleType(name)
    sys.modules[name] = module
    granted: dict = {}
    import_into(granted, STARRED_IN_PROGRAMS + STARRED, f"{MODULES}, {MODULES_IN_PROGRAMS}")
    vars(module)["__builtins__"] = granted | vars(builtins)
    exec(compile(program, "solution.py", "exec"), vars(module))
    return vars(module)


def run(program: str) -> None:
    load(program, "__main__")


def serve(program: str) -> None:
    """Answer requests [operation, operand, ...] until standard input ends."""
    refuse_forks(os.environ.pop("NO_FORKS", ""))
    requests = os.fdopen(os.dup(0))
    replies = os.fdopen(os.dup(1), "w")
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    names = load(program, "solution")
    objects = []

    def refer(value) -> list:
        if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
            return pack(value.tolist(), refer)
        objects.append(value)
        return ["handle", len(objects) - 1]

    def call_named(name, arguments):
        """A function, or the method of class Solution; the result as plain JSON data."""
        if name in names:
            function = names[name]
        elif "Solution" in names:
            function = getattr(names["Solution"](), name)
        else:
            raise NameError(f"the program defines neither {name} nor Solution")
        return loads(dumps(function(*arguments), default=to_list))

    operations: dict = {
        "names": lambda wanted: {name: names[name] for name in wanted if name in names},
        "call_named": call_named,
        "call": lambda function, args, kwargs: function(*args, **kwargs),
        "getattr": getattr, "setattr": setattr, "getitem": operator.getitem, "setitem": operator.setitem,
        "iter": iter, "next": next, "len": len, "bool": bool, "str": str, "repr": repr, "isinstance": isinstance,
    }
    for line in requests:
        try:
            operation, *operands = unpack(loads(line), objects.__getitem__)
            reply = {"value": pack(operations[operation](*operands), refer)}
            if operation == "call":  # a function may change its arguments
                reply["arguments"] = [pack(value, refer) for value in operands[1]]
        except BaseException as error:
            reply = {"error": type(error).__name__, "text": str(error)[:1000]}
        replies.write(dumps(reply) + "\n")
        replies.flush()


def to_list(value):
    return value.tolist() if hasattr(value, "tolist") else list(value)


def refuse_forks(code: str) -> None:
    """Install the system call filter that the jail gives, in hexadecimal digits."""
    if code:
        import ctypes
        import struct

        buffer = ctypes.create_string_buffer(bytes.fromhex(code))
        program = struct.pack("HxxxxxxP", len(code) // 16, ctypes.addressof(buffer))
        if ctypes.CDLL(None).prctl(22, 2, program) != 0:  # PR_SET_SECCOMP
            raise OSError("the kernel takes no seccomp filter")


# --------------------------------------------------------------------------- the process of the verdict

class CannotSend(BaseException):
    """An assertion gives the program something that is no data."""


class Handle:
    """Something in the program's process. Each operation is a request to it. It is `named` if the assertions name it:
    a function or class, an instance of the class (its name begins with a capital letter), their attributes. All others
    are results."""

    def __init__(self, client, number):
        vars(self).update(_client=client, _number=number, _named="")

    def name(self, value, name):
        if type(value) is Handle and self._named:
            vars(value)["_named"] = name
        return value

    def __call__(self, *args, **kwargs):
        value = self._client.request("call", self, args, kwargs)
        return self.name(value, "instance" if self._named[:1].isupper() else "")

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self.name(self._client.request("getattr", self, name), name)

    def __setattr__(self, name, value):
        self._client.request("setattr", self, name, value)

    def __getitem__(self, key):
        return self._client.request("getitem", self, key)

    def __setitem__(self, key, value):
        self._client.request("setitem", self, key, value)

    def __iter__(self):
        return self._client.request("iter", self)

    def __next__(self):
        return self._client.request("next", self)

    def __len__(self):
        return self._client.request("len", self)

    def __bool__(self):
        return self._client.request("bool", self)

    def __str__(self):
        return self._client.request("str", self)

    def __repr__(self):
        return self._client.request("repr", self)

    def __instancecheck__(self, value):
        return self._client.request("isinstance", value, self)

    def __eq__(self, other):
        return type(other) is Handle and other._number == self._number

    def __hash__(self):
        return self._number


class Client:
    """Sends requests to the program's process."""

    def __init__(self, process):
        self.process = process

    def request(self, operation, *operands):
        try:
            message = [pack(operand, self.refer) for operand in operands]
        except CannotSend as error:
            # a result that takes what data does not take is a wrong one, else a program could choose to have no verdict
            if not any(type(operand) is Handle and operand._named for operand in operands):
                raise TypeError(*error.args) from None
            raise
        self.process.stdin.write(dumps(["list", operation, *message]).encode() + b"\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline(MAX_REPLY)
        if not line.endswith(b"\n"):
            raise RuntimeError(f"the program ended, or its reply is longer than {MAX_REPLY}")
        reply = loads(line)
        if "error" in reply:
            kind = vars(builtins).get(reply["error"])
            if not (isinstance(kind, type) and issubclass(kind, Exception)):
                kind = RuntimeError
            if issubclass(kind, StopIteration) and operation != "next":
                kind = RuntimeError  # it would end a loop of the assertions before its last case
            raise kind(reply["text"])
        if operation == "call":
            for mine, changed in zip(operands[1], reply["arguments"]):
                if isinstance(mine, (list, dict, set)):
                    replace(mine, unpack(changed, self.resolve))
        return unpack(reply["value"], self.resolve)

    def refer(self, value) -> list:
        if type(value) is not Handle:
            raise CannotSend(f"a {type(value).__name__} cannot be given to the program")
        return ["handle", value._number]

    def resolve(self, number):
        return Handle(self, int(number))


def replace(mine, changed) -> None:
    """Give a list, dict or set of the assertions the content that the program left in its copy."""
    if type(changed) is not type(mine) or changed == mine:
        return
    if isinstance(mine, list):
        mine[:] = changed
    else:
        mine.clear()
        mine.update(changed)


def import_used(modules: dict) -> dict:
    """Those of {name: [module, attribute, ...]} that have these attributes."""
    found = {}
    for name, (path, *attributes) in modules.items():
        module = importlib.import_module(path)
        if all(hasattr(module, attribute) for attribute in attributes):
            found[name] = module
    return found


def judge(program: str, asked_by) -> None:
    """Exit code 0 if the assertions hold, 1 if not, CANNOT_JUDGE if they are no Python or need what cannot pass.
    asked_by: asked.py's."""
    import ctypes
    import subprocess  # only here: its import takes as long as many a program

    case = sys.stdin.read()
    names: dict = {}
    import_into(names, STARRED, MODULES)
    try:
        code = compile(case, "case.py", "exec")
        asked = asked_by(case, names.keys() | vars(builtins).keys())
    except SyntaxError as error:
        print(error, file=sys.stderr)
        sys.exit(CANNOT_JUDGE)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: no process of this user may look into this one
    here = os.path.dirname(os.path.abspath(sys.argv[0]))
    sys.path[:] = [folder for folder in sys.path if folder not in ("", here)]
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    vars(module).update(names)
    modules = import_used(asked.modules)
    vars(module).update(modules)
    command = [sys.executable, "-I", "-B", os.path.abspath(sys.argv[0]), "serve"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            client = Client(process)
            wanted = [name for name in asked.names if name not in modules]
            found = client.request("names", wanted)
            for name in [name for name in wanted if name in found]:  # it may answer with more: `set`, `all`
                if type(found[name]) is Handle:
                    vars(found[name])["_named"] = name
                vars(module)[name] = found[name]
            if asked.subject not in ("", *found):
                raise NameError(f"the program does not define {asked.subject}")
            exec(code, vars(module))
        except CannotSend as error:
            print(error, file=sys.stderr)
            sys.exit(CANNOT_JUDGE)
        finally:
            process.kill()


def main(role: str, program: str, *asked_by) -> None:
    sys.set_int_max_str_digits(0)  # tests and programs may have longer numbers than the 4,300 digits that Python reads
    sys.setrecursionlimit(50_000)  # as LiveCodeBench sets it: a right search may go deeper than 1,000 calls
    if sys.argv[1:]:
        serve(program)
    else:
        {"run": run, "serve": serve, "judge": judge}[role](program, *asked_by)
