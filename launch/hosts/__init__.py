"""Simulated hosts: network namespaces, links of a chosen speed between them, and a command on each."""
