"""Replicas that may be lost: each is a run with processes of its own, beside a membership server.

launcher   starts all replicas of its host, and starts one again that is lost
agent      the process beside it: the membership server, or the launcher's connection to one on another host
own        what a stage process knows of its replica: its folder, its connection to the server
"""
