"""The only schema of configuration."""
