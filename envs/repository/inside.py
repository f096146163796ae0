"""One operation in a repository: runs inside the jail or the container, where the model's programs run.

Reads a JSON object from standard input and prints one. The folder is unpacked from an archive, the operation runs, and
the folder is packed again if it changed: so nothing lasts but files, and nobody outside unpacks what a model packed.

    command   a shell command, with a time limit of its own
    read, write, replace   of one text file
    judge     the hidden tests, on the model's files

The text of this file is the program, so it imports the standard library alone. An image may have an old Python: it
runs on 3.6.
"""

import base64
import fnmatch
import importlib.machinery
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile

MAX_OUTPUT = 4000000  # bytes of a command's output that are read
CONFIGURES_TESTS = ("conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "setup.cfg",
                    "pyproject.toml", "sitecustomize.py", "usercustomize.py", "*.pth", "entry_points.txt",
                    ".gitattributes")
"""Names of files that can change what a test's result is: in the judged copy they are as in the snapshot. With a
`conftest.py` of its own a model can make each test pass; pytest loads as a plugin what an `entry_points.txt` names."""
RUNNERS = ("pytest.py", "_pytest.py", "pluggy.py", "unittest.py")
"""Modules that must not come from the model's files."""


def unpack(archive, folder):
    """An archive in base64. Its members stay inside of the folder, and no link in the folder takes them elsewhere."""
    with tarfile.open(fileobj=io.BytesIO(base64.b64decode(archive))) as tar:
        members = with_way(tar, folder)
        if hasattr(tarfile, "tar_filter"):
            tar.extractall(folder, members, filter="tar")
        else:
            tar.extractall(folder, members)


def with_way(tar, folder):
    for member in tar:
        make_way(folder, member)
        yield member


def make_way(folder, member):
    """Remove what lies where a member is unpacked, and links on the way there: a model could have put them there."""
    path = folder
    parts = os.path.normpath(member.name).split("/")
    for place, part in enumerate(parts):
        path = os.path.join(path, part)
        is_last = place == len(parts) - 1
        if os.path.islink(path) or (os.path.lexists(path) and not os.path.isdir(path)):
            os.unlink(path)
        elif is_last and os.path.isdir(path) and not member.isdir():
            shutil.rmtree(path)


def pack(folder):
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz", compresslevel=1) as tar:
        tar.add(folder, ".")
    return base64.b64encode(archive.getvalue()).decode()


def make_readable(folder):
    """The model may have taken its own rights away."""
    if os.path.islink(folder) or not os.path.isdir(folder):
        clear(folder)
        os.makedirs(folder)
    subprocess.call(["chmod", "-R", "u+rwX", folder], stderr=subprocess.DEVNULL)


def state(folder):
    """What tells whether a command has changed the folder."""
    found = {}
    for parent, folders, files in os.walk(folder):
        for name in folders + files:
            path = os.path.join(parent, name)
            about = os.lstat(path)
            found[path] = (about.st_mode, about.st_size, about.st_mtime_ns, about.st_ino)
    return found


def clear(path):
    if os.path.islink(path) or os.path.isfile(path):
        os.unlink(path)
    elif os.path.isdir(path):
        shutil.rmtree(path)


# --------------------------------------------------------------------------- the model's operations

def run(command, folder, timeout_s, text="", pass_fds=()):
    """Its exit code, None if it was ended, and what it printed. What it leaves in the background ends with the jail."""
    here = os.path.dirname(sys.executable)
    environment = dict(os.environ, PATH=here + ":" + os.environ.get("PATH", "/usr/bin:/bin"))
    environment.pop("NO_FORKS", None)
    read, write = os.pipe()
    os.write(write, text.encode())
    os.close(write)
    with open("output", "w+b") as output:
        process = subprocess.Popen(command, cwd=folder, stdin=read, stdout=output, stderr=subprocess.STDOUT,
                                   start_new_session=True, pass_fds=pass_fds, env=environment)
        os.close(read)
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return code, output.read(MAX_OUTPUT).decode(errors="replace")


def command(folder, given):
    code, output = run(["bash", "-c", given["command"]], folder, given["timeout_s"])
    return {"code": code, "output": output}


def read(folder, given):
    with open(os.path.join(folder, given["path"]), errors="replace") as file:
        return {"output": file.read(MAX_OUTPUT)}


def write(folder, given):
    path = os.path.join(folder, given["path"])
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path, "w") as file:
        file.write(given["text"])
    return {"output": ""}


def replace(folder, given):
    path = os.path.join(folder, given["path"])
    with open(path) as file:
        text = file.read()
    times = text.count(given["old"])
    if times != 1:
        raise ValueError(f"the text to replace occurs {times} times in {given['path']}, and must occur once")
    with open(path, "w") as file:
        file.write(text.replace(given["old"], given["new"]))
    return {"output": ""}


# --------------------------------------------------------------------------- the verdict

def judge(folder, given):
    """Run the hidden tests on the model's files. The folder holds the snapshot when this begins."""
    snapshot = set(state(folder))
    settings = files_that_configure_tests(folder)
    patched = re.findall(r"^(?:---|\+\+\+) [ab]/(.+?)\s*$", given["patch"], re.MULTILINE)
    for path in patched:
        if os.path.isfile(os.path.join(folder, path)):
            settings[path] = content_of(os.path.join(folder, path))
    clear(folder)
    os.makedirs(folder)
    unpack(given["files"], folder)
    make_readable(folder)
    for path in [*files_that_configure_tests(folder), *patched]:
        clear(os.path.join(folder, path))
    hidden = names_in(given["tests"]) if given["tests"] and not given["tests_folder"] else []
    for path in stand_ins(folder, [*hidden, *patched, *settings, *RUNNERS]):
        if path not in snapshot:
            clear(path)
    clear_compiled(folder)
    for path, content in settings.items():
        restore(os.path.join(folder, path), content)
    if given["tests"]:
        tests = os.path.realpath(given["tests_folder"] or folder)
        os.makedirs(tests, exist_ok=True)
        unpack(given["tests"], tests)
    if given["patch"]:
        apply(given["patch"], folder)
    reward_file = os.path.realpath(given["reward_file"]) if given["reward_file"] else ""
    if reward_file:
        os.makedirs(os.path.dirname(reward_file), exist_ok=True)
    if given["runner"]:
        result = run_tests(folder, given)
    else:
        code, output = run(["bash", "-c", given["command"]], folder, given["timeout_s"])
        result = {"code": code, "output": output, "passed": []}
    for path in (reward_file, reward_file[:-len(".txt")] + ".json"):  # Harbor's tests write one of them
        if reward_file and os.path.isfile(path):
            with open(path, errors="replace") as file:
                result.setdefault("reward", file.read(1000))
    return result


def files_that_configure_tests(folder):
    """{path in the folder: content}."""
    found = {}
    for parent, _, files in os.walk(folder):
        for name in files:
            path = os.path.join(parent, name)
            short = os.path.relpath(path, folder)
            if is_of_tests(short) or any(fnmatch.fnmatch(name, pattern) for pattern in CONFIGURES_TESTS):
                found[short] = content_of(path)
    return found


def is_of_tests(path):
    """Whether it is the `__init__.py` of a package of tests, which could lead to others. Not below any folder `test`:
    `django/test` is a part of Django."""
    *folders, name = path.split(os.sep)
    return name.startswith("__init__.") and ("tests" in folders or folders[:1] == ["test"])


def names_in(archive):
    with tarfile.open(fileobj=io.BytesIO(base64.b64decode(archive))) as tar:
        return [os.path.normpath(member.name) for member in tar if member.isfile()]


def stand_ins(folder, paths):
    """What Python may import instead of these modules of the folder, or of the folders that they lie in: a package is
    found before a module of the same name, and compiled code before source code."""
    endings = importlib.machinery.all_suffixes()
    found = set()
    for path in paths:
        if not path.endswith(".py"):
            continue
        parent = folder
        for part in path[:-len(".py")].split(os.sep):
            found.update(os.path.join(parent, part + ending) for ending in endings)
            parent = os.path.join(parent, part)
        found.update(os.path.join(parent, "__init__" + ending) for ending in endings)
    return [path for path in found if os.path.lexists(path)]


def clear_compiled(folder):
    """A file in `__pycache__` may say that it is never compared with its source."""
    for parent, folders, _ in os.walk(folder):
        if "__pycache__" in folders:
            folders.remove("__pycache__")
            clear(os.path.join(parent, "__pycache__"))


def content_of(path):
    """Of a file; of a link nothing."""
    if os.path.islink(path):
        return b""
    with open(path, "rb") as file:
        return file.read()


def restore(path, content):
    clear(path)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(content)


def apply(patch, folder):
    """A patch of the tests. Git reads the settings of a repository of its own: with those in the folder a model could
    have a program of its own filter what is written."""
    repository = os.path.abspath("git")
    subprocess.check_call(["git", "init", "--quiet", repository])
    environment = dict(os.environ, GIT_DIR=os.path.join(repository, ".git"), GIT_WORK_TREE=os.path.abspath(folder))
    process = subprocess.Popen(["git", "apply", "--whitespace=nowarn", "-"], cwd=folder, stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment)
    said, _ = process.communicate(patch.encode())
    if process.returncode != 0:
        raise ValueError("the tests' patch does not apply: " + said.decode(errors="replace")[-500:])


def run_tests(folder, given):
    """By `runner`, the text of test_runner.py. It writes each passed test with a key, which the model's code, imported
    later, has not been told; the key alone for one that passed after the test runner was changed."""
    key = base64.b16encode(os.urandom(16)).decode()
    program = os.path.abspath("test_runner.py")
    with open(program, "w") as file:
        file.write(given["runner"])
    with open("results", "w+b") as results:
        arguments = [sys.executable, "-B", program, str(results.fileno()), *given["arguments"]]
        code, output = run(arguments, folder, given["timeout_s"], key, (results.fileno(),))
        results.seek(0)
        lines = results.read().decode(errors="replace").splitlines()
    passed = [line[len(key) + 1:] for line in lines if line.startswith(key + " ")]
    return {"code": code, "output": output, "passed": passed, "runner_changed": key in lines}


def main():
    given = json.load(sys.stdin)
    folder = given["folder"]
    os.makedirs(folder, exist_ok=True)
    if given["files"]:
        unpack(given["files"], folder)
    operation = given["operation"]
    before = state(folder)
    kinds = {"command": command, "read": read, "write": write, "replace": replace, "judge": judge}
    try:
        result = kinds[operation["kind"]](folder, operation)
    except (OSError, ValueError, TypeError) as error:
        result = {"error": str(error)}
    if given["keep"] == "always" or (given["keep"] == "changes" and state(folder) != before):
        make_readable(folder)
        result["files"] = pack(folder)
    print(json.dumps(result))


main()
