"""Replicas that may be lost: each is a crew of processes of its own, and they meet at a process of the launcher.

own      what a stage process knows of its replica: its folder, its connection to the meeting place
place    the meeting place, as the launcher has it
pairs    the sockets between a launcher, its stage processes and the process that is their meeting place
hub      the meeting place itself: the rules of thinwire.pipeline.replicas.membership, behind such sockets
remote   a meeting place for several hosts, and the proxy through which a launcher reaches it
way      whether this host can get to a meeting place, before it reads data
crews    the launcher: it starts all crews of its host, and one again that is lost
"""
