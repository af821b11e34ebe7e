"""The limits that a helper process sets for itself before it reads anything from outside."""

import resource
import signal


def limit_this_process(memory_bytes: int) -> None:
    """No files and no core dump, at most `memory_bytes` of address space, and a CPU timer whose signal ends the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the server, which closes the pipe when it ends
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
