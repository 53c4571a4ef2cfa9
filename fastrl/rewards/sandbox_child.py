"""The process that shuts a program in: it makes the sandbox, waits for the program, and ends it.

``python sandbox_child.py JSON`` is started by :mod:`fastrl.rewards.sandbox` and needs the standard
library alone. For an isolated job it makes new namespaces (man 7 namespaces), stays outside of the
PID namespace, and forks its process 1, which forks the program; when process 1 ends, the kernel
kills all others of that namespace, in any session. How the program ended is written to stderr.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import signal
import sys
from contextlib import suppress
from typing import Any

NOBODY = 65534
NEW_ROOT = "/proc"  # exists everywhere, and holds none of the paths that the sandbox shows
# clone(2): mounts, control groups, names, System V IPC, users, processes, network
NAMESPACES = 0x20000 | 0x2000000 | 0x4000000 | 0x8000000 | 0x10000000 | 0x20000000 | 0x40000000
NOSUID, NODEV, REMOUNT, BIND, REC, PRIVATE = 2, 4, 32, 4096, 16384, 1 << 18  # flags of mount(2)
READ_ONLY = 1  # a flag of mount(2) and mount_setattr(2), as NOSUID and NODEV
PDEATHSIG, DUMPABLE, CAPBSET_DROP, NO_NEW_PRIVS = 1, 4, 24, 38  # options of prctl(2)
MOUNT_SETATTR = 442  # this system call's number on all processors below; pivot_root's differs
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41, "riscv64": 41, "ppc64le": 203, "s390x": 217}

libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    job = json.loads(sys.argv[1])
    ends = {signal.SIGALRM, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    call("prctl", PDEATHSIG, signal.SIGKILL)
    if os.getppid() != job["parent"]:  # the parent has ended meanwhile
        return
    with suppress(OSError):  # out of memory, the kernel ends this process first
        put("/proc/self/oom_score_adj", "1000")
    try:
        null = os.open("/dev/null", os.O_RDWR)
        if job["isolated"]:
            isolate(job)
        first = os.fork()
        if first == 0:
            run_first(job, null)
    except OSError as error:
        say(f"failed: {error.filename or 'fork'}: {error.strerror}")
        return

    def end(*_: Any) -> None:
        with suppress(ProcessLookupError):
            os.kill(first, signal.SIGKILL) if job["isolated"] else os.killpg(first, signal.SIGKILL)

    for number in ends:
        signal.signal(number, end)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ends)
    signal.setitimer(signal.ITIMER_REAL, job["wall_seconds"])
    os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
    if not job["isolated"]:
        end()  # ends the rest of the program's process group
    status = os.waitstatus_to_exitcode(os.waitpid(first, 0)[1])
    say(f"ended: {status}")


def isolate(job: dict[str, Any]) -> None:
    """Makes new namespaces: processes that are forked from now on see a root of read-only libraries
    and an empty folder, no processes but each other, and no network.

    Raises:
        OSError: the kernel, or a container around us, does not allow it; ``filename`` says what.
    """
    ready, go = os.pipe()
    mapper = os.fork()
    if mapper == 0:  # users are mapped from outside, where root may map other users, too
        os.close(go)
        os.read(ready, 1)
        os._exit(map_users(os.getppid()))
    call("unshare", NAMESPACES)
    os.close(go)
    failed = os.waitstatus_to_exitcode(os.waitpid(mapper, 0)[1])
    if failed:
        raise OSError(failed, os.strerror(failed), "uid_map")
    # The program may make no namespaces of its own, and no memory or messages that outlast it.
    # /proc/sys may be read-only, and older kernels keep the last two for the machine's root.
    for limit in ("user/max_user_namespaces", "kernel/shmall", "kernel/msgmni"):
        with suppress(OSError):
            put(f"/proc/sys/{limit}", "0")
    os.umask(0o022)
    call("mount", b"none", b"/", None, REC | PRIVATE, None)
    call("mount", b"tmpfs", NEW_ROOT.encode(), b"tmpfs", NOSUID | NODEV, b"size=1m,mode=0755")
    for path in job["paths"]:
        bind(path, READ_ONLY | NOSUID | NODEV)
    for name in ("null", "zero", "random", "urandom"):
        bind(f"/dev/{name}", READ_ONLY | NOSUID)
    for link, path in job["links"]:
        mount_point(os.path.dirname(NEW_ROOT + link))
        with suppress(FileExistsError):
            os.symlink(path, NEW_ROOT + link)
    limits = f"size={job['disk']},nr_inodes=10000,mode=0777"
    mount_point(f"{NEW_ROOT}/tmp")
    call("mount", b"tmpfs", f"{NEW_ROOT}/tmp".encode(), b"tmpfs", NOSUID | NODEV, limits.encode())
    os.chdir(NEW_ROOT)
    call("syscall", PIVOT_ROOT.get(platform.machine(), -1), b".", b".", name="pivot_root")
    call("umount2", b".", 2)  # MNT_DETACH, of the old root that lies above
    os.chdir("/")
    call("mount", b"none", b"/", None, REMOUNT | BIND | READ_ONLY | NOSUID | NODEV, None)
    os.chdir("/tmp")


def map_users(process: int) -> int:
    """Maps the users of a process's new namespace; returns an error number, or 0. Root's program
    becomes the user nobody, whose processes the kernel counts; another user's program has no rights
    but that user's."""
    user, group = os.geteuid(), os.getegid()
    maps = [(f"{NOBODY} {user} 1", f"{NOBODY} {group} 1")]
    if user == 0:
        maps.insert(0, (f"0 0 1\n{NOBODY} {NOBODY} 1",) * 2)
    for users, groups in maps:
        try:
            put(f"/proc/{process}/uid_map", users)
            if user != 0:
                put(f"/proc/{process}/setgroups", "deny")
            put(f"/proc/{process}/gid_map", groups)
            return 0
        except OSError as error:
            failed = error.errno or 1
    return failed


def bind(path: str, attributes: int) -> None:
    """Shows a file or folder in the new root, at its own path."""
    target = NEW_ROOT + path
    if os.path.isdir(path):
        mount_point(target)
    else:
        mount_point(os.path.dirname(target))
        os.mknod(target)
    call("mount", path.encode(), target.encode(), None, BIND | REC, None)
    wanted = (ctypes.c_uint64 * 4)(attributes, 0, 0, 0)  # struct mount_attr
    recursive = 0x8000
    call(
        *("syscall", MOUNT_SETATTR, -100, target.encode(), recursive, wanted, 32),
        name="mount_setattr",
    )


def mount_point(path: str) -> None:
    """Makes a folder in the new root, which stands in memory."""
    os.makedirs(path, exist_ok=True)


def run_first(job: dict[str, Any], null: int) -> None:
    """Gives up its rights if isolated, as process 1; starts the program and ends when that does."""
    os.setsid()  # kill(0) reaches no one outside
    if job["isolated"]:
        give_up_rights()
    call("prctl", PDEATHSIG, signal.SIGKILL)
    program = os.fork()
    if program == 0:
        os.dup2(null, 2)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        cpu = int(-(-job["seconds"] // 1))
        for name, most in (
            *(("CPU", cpu), ("AS", job["memory"]), ("FSIZE", job["disk"]), ("CORE", 0)),
            *(("NOFILE", 64), *([("NPROC", job["processes"] + 2)] if job["isolated"] else [])),
        ):
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))
        os.execv(job["command"][0], job["command"])
    while True:
        child, status = os.wait()
        if child == program:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def give_up_rights() -> None:
    """Leaves this process an ordinary user's rights, no capabilities, and no way to new ones."""
    for capability in range(64):
        if libc.prctl(CAPBSET_DROP, capability, 0, 0, 0):
            break  # there are no more
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    version_3, this_process, none = 0x20080522, 0, (ctypes.c_uint32 * 6)()
    call("capset", (ctypes.c_uint32 * 2)(version_3, this_process), none)
    call("prctl", NO_NEW_PRIVS, 1)
    call("prctl", DUMPABLE, 0)  # the program cannot look into this one


def call(function: str, *arguments: Any, name: str = "") -> None:
    """Calls a function of C.

    Raises:
        OSError: it failed.
    """
    whole = (*arguments, 0, 0, 0, 0)[:5] if function == "prctl" else arguments
    if getattr(libc, function)(*(ctypes.c_long(x) if type(x) is int else x for x in whole)):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), name or function)


def put(path: str, text: str) -> None:
    """Writes to a file of the kernel's, in one go."""
    file = os.open(path, os.O_WRONLY)
    try:
        os.write(file, text.encode())
    finally:
        os.close(file)


def say(text: str) -> None:
    os.write(2, text.encode())


if __name__ == "__main__":
    main()
