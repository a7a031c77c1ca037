"""Tests of what is between nodes; those that need a Ray share one, see conftest.py."""
