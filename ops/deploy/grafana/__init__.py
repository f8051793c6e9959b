"""Dashboards for Grafana, made from Python; `dashboards.py` is the module to run."""
