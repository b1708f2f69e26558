"""The time of a step, by arithmetic: a workload, the simulation of its schedule, and the LIMIT."""
