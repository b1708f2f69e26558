"""Replicas on several hosts: a meeting place that listens, and the way of each replica to it, encrypted.

agreement  what all replicas must agree on, as text that each can show
line       a stream of bytes in each direction, over one connection after the other
hall       the meeting place: who may come, who is silent, who has ended; around the same rules as on one machine
door       the socket that the hall listens at
settings   what a gate must know
gate       the process of a launcher that brings its replica to the hall

The launcher and its stage processes are those of one machine: they speak to a process beside them. There it is the
meeting itself; here it is the gate. All connections go from a gate to the hall, so only the hall's host listens.
"""
