"""Heartbeats: a stage that is stopped or stuck is noticed by its silence, long before `wire.timeout`."""
