"""`python -m router.workers NUMBER/COUNT CORD SUPERVISOR`: a worker. Only a supervisor starts it so."""

import socket
import sys

from router.workers.worker import work

if __name__ == "__main__":
    _, cord, supervisor = sys.argv[1:]  # the first is for who looks at the list of processes
    sys.exit(work(socket.socket(fileno=int(cord)), int(supervisor)))
