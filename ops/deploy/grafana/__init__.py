"""Dashboards for Grafana, made from Python; `dashboards.py` is the one to run."""
