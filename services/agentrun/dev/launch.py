"""Becomes another program that ends with its parent and, when root starts it, runs as an ordinary account.

    python -I -S launch.py SIGNAL PARENT UID:GID|- PROGRAM ARGUMENT...

A program of its own and not a `preexec_fn`: that is unsafe (and warned of) in a process that has threads.
The parent-death signal is Linux only and follows the *thread* that started the child: start children in the main thread.
It is asked for last, since changing the account clears it (prctl(2)).
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Account:
    """The account that a program runs as."""

    uid: int
    gid: int


def command(program: Sequence[str], *, last_signal: signal.Signals, account: Account | None = None) -> list[str]:
    """The command line that runs program so that it gets last_signal when this process dies."""
    who = f"{account.uid}:{account.gid}" if account else "-"
    return [sys.executable, "-I", "-S", __file__, str(int(last_signal)), str(os.getpid()), who, *program]


def _main(last_signal: int, parent: int, who: str, program: list[str]) -> None:
    prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None
    if who != "-":
        uid, gid = (int(number) for number in who.split(":"))
        os.setgroups([])
        os.setgid(gid)
        os.setuid(uid)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, last_signal, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit("the parent died first")
    os.execv(program[0], program)


if __name__ == "__main__":
    _main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
