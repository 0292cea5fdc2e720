"""The other driver of the core: models of hardware and replicas, and the emulated replica."""
