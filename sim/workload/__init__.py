"""Sessions of coding agents, as what they send and when.

A session is a tree of conversations: a main thread, and forks that it waits for. A conversation is a sequence of
turns, each a request that is sent some time after the answer before it (closed loop). All chance of a session comes
from a stream of its own, and that of a fork from one of the fork's, so that every policy meets the same sessions.
"""

from sim.workload.arrivals import Population, Rate, arrivals, open_arrivals
from sim.workload.conversation import Conversation, Turn
from sim.workload.forks import NO_FORKS, Forks
from sim.workload.patience import PATIENT, Patience
from sim.workload.recorded import Recorded, RecordedWorkload, load_recorded
from sim.workload.sessions import GAP_CAP_S, Workload
from sim.workload.synthetic import NO_BREAKS, Breaks, Synthetic
from sim.workload.synthetic_workload import SyntheticWorkload

__all__ = [
    "GAP_CAP_S",
    "NO_BREAKS",
    "NO_FORKS",
    "PATIENT",
    "Breaks",
    "Conversation",
    "Forks",
    "Patience",
    "Population",
    "Rate",
    "Recorded",
    "RecordedWorkload",
    "Synthetic",
    "SyntheticWorkload",
    "Turn",
    "Workload",
    "arrivals",
    "load_recorded",
    "open_arrivals",
]
