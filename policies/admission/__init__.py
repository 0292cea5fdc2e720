"""Who may be placed now, who waits, who is refused. Beside the Balancer, and as pure."""

from policies.admission.admission import Admission
from policies.admission.config import AdmissionConfig
from policies.admission.room import Priority, Shed, ShedReason, Ticket

__all__ = ["Admission", "AdmissionConfig", "Priority", "Shed", "ShedReason", "Ticket"]
