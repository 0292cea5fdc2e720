"""A real HTTP server that behaves like an SGLang 0.5.23 replica, in scaled wall-clock time.

Its answers are compared with recordings of a real server in tests/emulator. Where it knowingly differs:

- Tokens are four bytes of text, words of the answer are chosen by the prompt's hash, and tools are never called.
- The whole output's KV is set aside at admission, so nothing is retracted, and prompts are prefilled one at a time.
- A queue limit counts what has no slot in the running batch, so that bursts are refused predictably.
- A client that left is noticed at once, unless `disconnect_seconds` says otherwise; the real one takes up to 4 s.
- No start-up phase, log probabilities, stop strings, KV events or load socket;
  no host tier in the cache; of the metrics, gauges and counters only, and of /server_info a few fields of some 500.
- Not recorded from an engine but read or inferred: error bodies of /generate, /v1/messages and /v1/responses, events
  and store of /v1/responses, bodies of non-streaming /v1/completions and /v1/messages and of pause and continue.
"""

from sim.emulator.config import EmulatorConfig
from sim.emulator.server import Emulator

__all__ = ["Emulator", "EmulatorConfig"]
