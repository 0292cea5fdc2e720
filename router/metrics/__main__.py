"""`python -m router.metrics`: the tables of metrics and labels as they stand in docs/operations.md."""

import signal

from router.metrics.table import markdown

if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` is no fault
    print("\n".join(markdown()))
