"""The data plane: bytes between clients and replicas."""
