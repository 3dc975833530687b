"""Load for Locust: see docs/load.md."""
