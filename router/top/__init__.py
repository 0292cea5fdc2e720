"""`warmroute top`: a running router, live in a terminal."""

from router.top.top import live, once

__all__ = ["live", "once"]
