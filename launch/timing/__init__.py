"""How long a step takes, by arithmetic: a workload, the simulation of its schedule, and the LIMIT."""
