"""Replicas that may be lost: each is a crew of processes of its own, and they meet at a process of the launcher.

own      what a stage process knows of its replica: its folder, its connection to the meeting place
place    the meeting place, as the launcher has it
hub      the meeting place itself: sockets around the rules of thinwire.pipeline.replicas.membership
crews    the launcher: it starts all crews, and one again that is lost
"""
