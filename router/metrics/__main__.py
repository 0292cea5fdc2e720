"""`python -m router.metrics`: the tables of metrics and labels as they stand in docs/operations.md."""

from router.metrics.table import markdown

if __name__ == "__main__":
    print("\n".join(markdown()))
