"""A process group over ZeroMQ: encrypted with keys that every process of a run holds, and whole after a broken link.

ZeroMQ sends, encrypts and reconnects. This package sends again what ZeroMQ loses with a connection.

    keys         the pair of keys of a run, and its file
    packets      what travels: its form, in bytes
    flows        sequence numbers at both ends of a flow of packets: what is acknowledged, and what is sent again
    mailbox      packets put together to messages, which posted receives take
    connections  one connection to one process: a socket until it breaks, then another socket
    loop         the thread that owns all sockets of a process
    mesh         the connections of a process to all others
    group        the process group, as torch sees it, and how its processes find each other

Nothing here is imported unless `wire.transport` is zmq, or keys are made.
"""
