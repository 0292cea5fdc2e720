"""Grafana dashboards as code. `make dashboards` writes the JSON beside this from it."""
