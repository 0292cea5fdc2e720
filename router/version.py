"""Which version of warmroute this is."""

from importlib import metadata

VERSION = metadata.version("warmroute")
"""Looked up once: it reads the distribution's files, which is nothing for the event loop to do at each question."""
