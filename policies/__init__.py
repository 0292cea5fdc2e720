"""The core of warmroute: which replica serves a request, and what is known of them all.

Nothing here knows a clock, a network, a log, a thread or an `await`: callers tell what
happened and when, and ask for a choice. The live router and the simulator drive the same code.
"""
