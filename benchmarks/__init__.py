"""Measurements of the service: ratios against peers and physical bounds, from interleaved rounds. See run_all.py."""
