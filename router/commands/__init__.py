"""The commands of `warmroute`, a module for each noun: its parsers, and what they run."""
