"""What the router counts, and how Prometheus gets it."""

from router.metrics.metrics import Metrics

__all__ = ["Metrics"]
