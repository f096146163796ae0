"""The system calls that no model-written program needs: a seccomp filter, made and installed with the standard library.

Refused, because it would get around a limit of jail.py or reach another process:
  memory outside of the address space   memfd_create, memfd_secret, shmget, msgget, semget, mq_open, vmsplice; larger
                                        buffers of sockets and pipes; sendmsg, which can send descriptors and so hold
                                        more of them than a process may; watches (inotify, fanotify), rules (landlock)
  kernel surface                        io_uring, bpf, perf_event_open, userfaultfd, sockets but unix, internet, netlink
  other processes                       ptrace, process_vm_*, pidfd_getfd, keys of the kernel's keyrings
  new namespaces                        unshare, setns, clone with CLONE_NEW*, clone3 (its flags are in memory)
  starting processes                    fork, vfork, clone without CLONE_THREAD (`forks=False`); threads are allowed
"""

import ctypes
import errno
import platform
import struct

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # AUDIT_ARCH_*
# name: numbers on x86-64 and arm64; None: the architecture has no such call
REFUSED = {
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "msgget": (68, 186),
    "semget": (64, 190), "mq_open": (240, 180), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427), "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438), "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "unshare": (272, 97), "setns": (308, 268), "vmsplice": (278, 75), "sendmsg": (46, 211), "sendmmsg": (307, 269),
    "inotify_init": (253, None), "inotify_init1": (294, 26), "fanotify_init": (300, 262),
    "landlock_create_ruleset": (444, 444), "landlock_add_rule": (445, 445), "landlock_restrict_self": (446, 446),
}
FORKS = {"fork": (57, None), "vfork": (58, None)}
CLONE = (56, 220)
CLONE3 = (435, 435)
SOCKET = (41, 198)
SETSOCKOPT = (54, 208)
FCNTL = (72, 25)
FAMILIES = (1, 2, 10, 16)  # AF_UNIX, AF_INET, AF_INET6, AF_NETLINK (the C library lists interfaces by it)
CLONE_THREAD = 0x10000
CLONE_NEW = 0x7E020000     # CLONE_NEWNS, CLONE_NEWUSER and the others
SOL_SOCKET = 1
BUFFERS = (7, 8, 32, 33)   # SO_SNDBUF, SO_RCVBUF, and both with FORCE
F_SETPIPE_SZ = 1031
X32_CALLS = 0x40000000     # x86-64 kernels take a second set of numbers from here on

# instructions of classic BPF
LOAD = 0x20
EQUAL = 0x15
AT_LEAST = 0x35
ANY_BIT = 0x45
RETURN = 0x06
# offsets in struct seccomp_data
NUMBER = 0
ARCHITECTURE = 4
ARGUMENTS = (16, 24, 32)
# what a filter returns
ALLOW = 0x7FFF0000
ERROR = 0x00050000
# prctl
SET_SECCOMP = 22
MODE_FILTER = 2


def make_filter(forks: bool) -> bytes:
    """The filter as the kernel takes it, an array of struct sock_filter. forks: the program may start processes."""
    machine = platform.machine()
    if machine not in ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"no system call numbers for {machine}; known: {', '.join(ARCHITECTURES)}")
    column = list(ARCHITECTURES).index(machine)
    lines = []

    def add(code: int, operand: int, if_true: int = 0, if_false: int = 0) -> None:
        """if_true, if_false: how many lines to skip."""
        lines.append(struct.pack("HBBI", code, if_true, if_false, operand))

    def refuse(number: int, error: int) -> None:
        add(EQUAL, number, if_false=1)
        add(RETURN, ERROR | error)

    add(LOAD, ARCHITECTURE)
    add(EQUAL, ARCHITECTURES[machine], if_true=1)
    add(RETURN, ERROR | errno.ENOSYS)
    add(LOAD, NUMBER)
    add(AT_LEAST, X32_CALLS, if_false=1)
    add(RETURN, ERROR | errno.ENOSYS)
    for numbers in [*REFUSED.values(), *([] if forks else FORKS.values())]:
        if numbers[column] is not None:
            refuse(numbers[column], errno.EPERM)
    refuse(CLONE3[column], errno.ENOSYS)  # the C library then uses clone
    add(EQUAL, CLONE[column], if_false=4 if forks else 6)
    add(LOAD, ARGUMENTS[0])
    add(ANY_BIT, CLONE_NEW, if_false=1)
    add(RETURN, ERROR | errno.EPERM)
    if not forks:
        add(ANY_BIT, CLONE_THREAD, if_true=1)
        add(RETURN, ERROR | errno.EPERM)
    add(RETURN, ALLOW)
    add(EQUAL, FCNTL[column], if_false=4)
    add(LOAD, ARGUMENTS[1])
    refuse(F_SETPIPE_SZ, errno.EPERM)
    add(RETURN, ALLOW)
    add(EQUAL, SETSOCKOPT[column], if_false=5 + 2 * len(BUFFERS))
    add(LOAD, ARGUMENTS[1])
    add(EQUAL, SOL_SOCKET, if_true=1)
    add(RETURN, ALLOW)
    add(LOAD, ARGUMENTS[2])
    for option in BUFFERS:
        refuse(option, errno.EPERM)
    add(RETURN, ALLOW)
    add(EQUAL, SOCKET[column], if_false=2 + 2 * len(FAMILIES))
    add(LOAD, ARGUMENTS[0])
    for family in FAMILIES:
        add(EQUAL, family, if_false=1)
        add(RETURN, ALLOW)
    add(RETURN, ERROR | errno.EAFNOSUPPORT)
    add(RETURN, ALLOW)
    return b"".join(lines)


def install(code: bytes) -> None:
    """For this process and all that it becomes or starts; PR_SET_NO_NEW_PRIVS must be set. Raises OSError."""
    buffer = ctypes.create_string_buffer(code)
    program = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(SET_SECCOMP, MODE_FILTER, program) != 0:
        raise OSError(ctypes.get_errno(), "the kernel takes no seccomp filter")
