"""The figures of the paper on simulated engines (docs/simulation.md)."""
