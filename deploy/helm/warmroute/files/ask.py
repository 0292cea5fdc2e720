"""What `helm test` runs: asks each URL that it is given until it answers well, for a minute at most.

200 is well, and so is 401, by which a router or an engine with keys answers who has none. Certificates are not looked
at: they are made for other names than the Service's.
"""

import ssl
import sys
import time
import urllib.error
import urllib.request

LIMIT_S = 60.0


def ask(url: str) -> str:
    """What is wrong with its answer; empty when nothing is."""
    try:
        with urllib.request.urlopen(url, timeout=10, context=ssl._create_unverified_context()) as answer:
            return "" if answer.status == 200 else f"status {answer.status}"
    except urllib.error.HTTPError as error:
        return "" if error.code == 401 else f"status {error.code}: {error.read(500).decode(errors='replace')}"
    except OSError as error:
        return str(error)


def main(urls: list[str], limit_s: float) -> int:
    end = time.monotonic() + limit_s
    for url in urls:
        while (wrong := ask(url)) and time.monotonic() < end:
            time.sleep(1)
        print(f"{url}: {wrong or 'answers'}", flush=True)
        if wrong:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], LIMIT_S))
