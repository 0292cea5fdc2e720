"""What has been claimed in public for systems of this kind, beside what the simulator makes of it.

Each claim is a function that plays scenarios and compares figures; docs/claims.md tells settings and reasons. Prints
Markdown. Deterministic, but for its own speed.

    python -m benchmarks.claims                                   # all
    python -m benchmarks.claims even tuned --seeds 71..72 --jobs 2
"""
