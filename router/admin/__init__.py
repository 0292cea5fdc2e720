"""The admin port: what an operator, a probe or Prometheus asks, a module for each noun."""

from router.admin.admin import Admin
from router.admin.guard import Guard

__all__ = ["Admin", "Guard"]
