"""Benchmarks of Parrot: ``python -m bench NAME [--quick] [--json FILE]``."""
