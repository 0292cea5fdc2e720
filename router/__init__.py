"""The shell of warmroute: the live router around the core in `policies`."""
