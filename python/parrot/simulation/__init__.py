"""The real manager and thousands of simulated engines in one process, on simulated time."""
