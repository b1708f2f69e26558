"""Hosts without machines: network namespaces joined by links of a chosen speed, and a command on each."""
