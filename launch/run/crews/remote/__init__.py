"""Replicas on several hosts: a meeting place that listens, and the way of each replica to it, encrypted.

agreement  what all replicas must agree on, as text that each can show
stream     a stream of bytes in each direction, over one connection after the other
server     the meeting place: who may come, who is silent, who has ended; around the same rules as on one machine
listener   the socket that the server listens at
settings   what a proxy must know
proxy      the process of a launcher that brings its replica to the server

The launcher and its stage processes are those of one machine: they speak to a process beside them. There it is the
meeting itself; here it is the proxy. All connections go from a proxy to the server, so only the server's host listens.
"""
