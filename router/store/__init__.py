"""What several routers share. Implementations: memory (this process), Redis, and one among the workers of a machine."""

from router.store.memory import MemoryStore
from router.store.store import Heard, Message, Remembered, Store, StoreError

__all__ = ["Heard", "MemoryStore", "Message", "Remembered", "Store", "StoreError"]
