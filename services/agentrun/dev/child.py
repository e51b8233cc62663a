"""A worker process that ends with its parent.

    python -m agentrun.dev.child worker

Standard input is a pipe that the parent holds open and never writes to. Its end means that the parent is gone, killed or not: this
process then exits at once, since the stores go away too. What it was working on is found by the next start.
"""

import os
import runpy
import threading


def _exit_with_parent() -> None:
    while os.read(0, 1024):
        pass
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_exit_with_parent, name="parent", daemon=True).start()
    runpy.run_module("agentrun", run_name="__main__", alter_sys=True)
